"""A generation that its limit cuts."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A:" + sgl.gen("a", max_tokens=2) + "." + sgl.gen("b", max_tokens=1)


CASE = Case(
    program,
    {"A:": " x y z", ".": "1"},
    text="A: x y.1",
    variables={"a": " x y", "b": "1"},
    programs=1,
)
