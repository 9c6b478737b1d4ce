"""A body that reads what has failed, and does not catch it."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", regex="[a-z]", check=lambda text: False)
    s += s["x"]


CASE = Case(program, {"A: ": "b"}, raises=sgl.ValueValidationError, programs=1)
