"""A generation that nothing precedes but a letter."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "a"
    s += sgl.gen("x")


CASE = Case(program, {"a": "b c"}, text="ab c", variables={"x": "b c"}, programs=1)
