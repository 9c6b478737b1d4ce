"""One node's other backend fails; what it fails can be taken back."""

import sglang_lite as sgl
from tests.conformance.case import Case, Down


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", max_tokens=2)
    with s.checkpoint() as place:
        s += " B: " + sgl.gen("y", backend=Down())
        s["failed"] = type(s.error())
        place.rollback()
    s += " C: " + sgl.gen("z", max_tokens=2)


CASE = Case(
    program,
    {"A: ": "1", "C: ": "3"},
    text="A: 1 C: 3",
    variables={"x": "1", "z": "3", "y": sgl.UnknownVariableError},
    streams=False,
    programs=1,
)
