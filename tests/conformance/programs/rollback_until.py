"""Tries until a value will do."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Number: "
    with s.checkpoint() as place:
        for _ in range(6):
            s += sgl.gen("x", regex="[1-9]")
            if s["x"] > "5":
                break
            place.rollback()
            s += "(again) "
    s += "."


CASE = Case(
    program,
    {"": ["1", "2", "7"]},
    text="Number: (again) 7.",
    variables={"x": "7"},
    streams=False,
    programs=1,
)
