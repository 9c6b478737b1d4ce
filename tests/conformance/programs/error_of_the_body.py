"""A body that raises."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", max_tokens=3)
    raise KeyError("mine")


CASE = Case(program, {"A: ": "1"}, raises=KeyError, programs=1)
