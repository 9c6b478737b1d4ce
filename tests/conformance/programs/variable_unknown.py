"""A name that the program never makes."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "a" + sgl.gen("x", max_tokens=3)


CASE = Case(
    program, {"a": "b"}, text="ab", variables={"x": "b", "y": sgl.UnknownVariableError}, programs=1
)
