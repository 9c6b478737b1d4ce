"""A name that is used again has the newer value."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", max_tokens=3) + ", B: " + sgl.gen("x", max_tokens=3)


CASE = Case(program, {"A: ": "1", "B: ": "2"}, text="A: 1, B: 2", variables={"x": "2"}, programs=1)
