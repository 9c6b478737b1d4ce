"""A rollback of a generation that nobody has read."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "a"
    with s.checkpoint() as place:
        s += "b" + sgl.gen("gone", max_tokens=20)
        place.rollback()
    s += "c" + sgl.gen("x", max_tokens=3)


CASE = Case(
    program,
    {"b": "1", "ac": "2"},
    text="ac2",
    variables={"x": "2", "gone": sgl.UnknownVariableError},
    streams=False,
    programs=1,
)
