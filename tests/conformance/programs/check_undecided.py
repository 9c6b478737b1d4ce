"""A check that gives no truth value."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", max_tokens=2, check=lambda text: "maybe")


CASE = Case(
    program, {"A: ": "1"}, text=sgl.ParameterError, variables={"x": sgl.ParameterError}, programs=1
)
