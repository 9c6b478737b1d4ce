"""A value that is read decides what is added."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Is it? " + sgl.gen("x", regex="yes|no") + ". "
    if s["x"] == "yes":
        s += "Why? " + sgl.gen("why", max_tokens=4)
    else:
        s += "Why not? " + sgl.gen("why", max_tokens=4)


CASE = Case(
    program,
    {"Is it? ": "no", "Why? ": "a", "Why not? ": "b"},
    text="Is it? no. Why not? b",
    variables={"x": "no", "why": "b"},
    programs=1,
)
