"""A program that cancels itself works again from before."""

import sglang_lite as sgl
from tests.conformance.case import Case, never


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", max_tokens=2)
    s.sync()
    with s.checkpoint() as place:
        s += " B: " + sgl.gen("y", max_tokens=2, check=never)
        s.cancel()
        place.rollback()
    s += " C: " + sgl.gen("z", max_tokens=2)


CASE = Case(
    program,
    {"A: ": "1", "B: ": "2", "C: ": "3"},
    text="A: 1 C: 3",
    variables={"x": "1", "z": "3", "y": sgl.UnknownVariableError},
    streams=False,
    programs=1,
)
