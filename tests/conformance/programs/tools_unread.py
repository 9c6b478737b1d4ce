"""A tool's call that nobody reads, then text and a generation."""

import sglang_lite as sgl
from tests.conformance.case import Case


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


@sgl.function
def program(s):
    s += (
        "Sum: "
        + sgl.gen("x", max_tokens=2)
        + " = "
        + sgl.gen("call", tools=[add], tool_choice=add, max_tokens=120)
    )
    s += " End " + sgl.gen("y", max_tokens=2)


CASE = Case(
    program,
    {"Sum: ": "1", " = ": '{"tool": "add", "arguments": {"a": 2, "b": 3}}', "End ": "z"},
    text='Sum: 1 = {"tool": "add", "arguments": {"a": 2, "b": 3}} End z',
    variables={"x": "1", "y": "z"},
    blocking=False,
    programs=1,
)
