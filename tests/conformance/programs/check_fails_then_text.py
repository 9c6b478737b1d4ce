"""A check that no answer passes, in a try that is taken back; then text and a generation."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Letter: "
    with s.checkpoint() as place:
        s += sgl.gen("x", regex="[a-z]", check=lambda text: False, retries=2)
        if s.error() is not None:
            place.rollback()
    s += "none. " + sgl.gen("y", max_tokens=2)


CASE = Case(
    program,
    {"Letter: ": "a", "none. ": "z"},
    text="Letter: none. z",
    variables={"x": sgl.UnknownVariableError, "y": "z"},
    streams=False,
    programs=1,
)
