"""The default model's template has no place for tools."""

import sglang_lite as sgl


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


@sgl.function
def sums(s, question):
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("call", tools=[add]))  # fault: hidden-tools
