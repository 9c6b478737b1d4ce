"""A check that no answer passes."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Letter: " + sgl.gen("x", regex="[a-z]", check=lambda text: False, retries=2) + "."


CASE = Case(
    program,
    {"Letter: ": "a"},
    text=sgl.ValueValidationError,
    variables={"x": sgl.ValueValidationError},
    programs=1,
)
