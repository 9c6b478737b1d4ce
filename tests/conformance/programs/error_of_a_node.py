"""A node that fails fails what comes after it, and not what came before."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += (
        "A: "
        + sgl.gen("x", max_tokens=3)
        + " B: "
        + sgl.gen("y", regex="[a-z]", check=lambda text: False)
    )
    s += " C: " + sgl.gen("z", max_tokens=3)


CASE = Case(
    program,
    {"A: ": "1", "B: ": "b", "C: ": "3"},
    text=sgl.ValueValidationError,
    variables={"x": "1", "y": sgl.ValueValidationError, "z": sgl.ValueValidationError},
    programs=1,
)
