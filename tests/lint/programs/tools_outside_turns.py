"""Outside turns no template shows tools. The second generation's are described."""

import sglang_lite as sgl
from sglang_lite.lang.agent import describe


def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtracts."""
    return a - b


@sgl.function
def sums(s, question):
    s += f"{describe([subtract])}\n{question}\n"
    s += sgl.gen("less", tools=[subtract])
    s += "\n" + sgl.gen("more", tools=[add])  # fault: hidden-tools
