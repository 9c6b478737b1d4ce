"""A tool that the model calls."""

import json

import sglang_lite as sgl
from tests.conformance.case import Case


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


@sgl.function
def program(s):
    s += "Sum: " + sgl.gen("call", tools=[add], tool_choice="required", max_tokens=120)
    s["sum"] = s["call"].run()


CASE = Case(
    program,
    {"Sum: ": json.dumps({"tool": "add", "arguments": {"a": 2, "b": 3}})},
    text="Sum: " + json.dumps({"tool": "add", "arguments": {"a": 2, "b": 3}}),
    variables={"sum": 5},
    blocking=False,
    engine=False,
    programs=1,
)
