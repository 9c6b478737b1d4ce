"""A longer text between generations."""

import sglang_lite as sgl
from tests.conformance.case import Case

LONG = "All work and no play makes a dull text. " * 3


@sgl.function
def program(s):
    s += LONG + sgl.gen("a", max_tokens=2) + LONG + sgl.gen("b", max_tokens=2)


CASE = Case(
    program, {". ": "x"}, text=LONG + "x" + LONG + "x", variables={"a": "x", "b": "x"}, programs=1
)
