"""A generation without a name goes into the text all the same."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Q: " + sgl.gen() + "." + sgl.gen("x")


CASE = Case(
    program, {"Q: ": "one", ".": "two"}, text="Q: one.two", variables={"x": "two"}, programs=1
)
