"""A generation."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Q: " + sgl.gen("x")


CASE = Case(program, {"Q: ": "one"}, text="Q: one", variables={"x": "one"}, programs=1)
