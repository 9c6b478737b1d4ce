"""A node that is never answered: its limit fails it, and what comes after it."""

import sglang_lite as sgl
from tests.conformance.case import Case, Never


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", max_tokens=2) + " B: " + sgl.gen("y", backend=Never(), timeout=0.01)
    s += " C: " + sgl.gen("z", max_tokens=2)


CASE = Case(
    program,
    {"A: ": "1", "C: ": "3"},
    text=sgl.RequestTimeoutError,
    variables={"x": "1", "y": sgl.RequestTimeoutError, "z": sgl.RequestTimeoutError},
    programs=1,
)
