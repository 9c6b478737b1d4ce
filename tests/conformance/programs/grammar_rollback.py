"""A rollback inside a grammar."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    with s.grammar(sgl.Regex("[ab]{1,20}[.]")):
        s += "a"
        with s.checkpoint() as place:
            s += "b" + sgl.gen("x", regex="[ab]{2}")
            place.rollback()
        s += "a" + sgl.gen("y", regex="[ab]{2}") + "."
    s += sgl.gen("z", max_tokens=2)


CASE = Case(
    program,
    {"ab": "bb", "aa": "ba", ".": "w"},
    text="aaba.w",
    variables={"x": sgl.UnknownVariableError, "y": "ba", "z": "w"},
    blocking=False,
    streams=False,
    programs=1,
)
