"""A program that begins with a selection."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "?" + sgl.select("x", ("yes", "no"))
    s += " since " + sgl.gen("y", max_tokens=2)


CASE = Case(
    program,
    {"?": "no", "since ": "z"},
    text="?no since z",
    variables={"x": "no", "y": "z"},
    programs=1,
)
