"""Selections, one right after the other."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += (
        "A "
        + sgl.select("a", ["x", "y"])
        + sgl.select("b", ["p", "q"])
        + sgl.gen("c", max_tokens=3)
    )


CASE = Case(
    program,
    {"A ": "y", "y": "p", "p": "z"},
    text="A ypz",
    variables={"a": "y", "b": "p", "c": "z"},
    programs=1,
)
