"""Text and variables of a first try are taken back."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Try: "
    with s.checkpoint() as place:
        s += "one " + sgl.gen("x", regex="[a-c]")
        s["first"] = s["x"]
        place.rollback()
        s += "two " + sgl.gen("y", regex="[a-c]")
    s += "."


CASE = Case(
    program,
    {"one ": "a", "two ": "b"},
    text="Try: two b.",
    variables={"x": sgl.UnknownVariableError, "first": sgl.UnknownVariableError, "y": "b"},
    streams=False,
    programs=1,
)
