"""Limits of time that are kept."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", max_tokens=3, timeout=60) + " B: " + sgl.gen("y", max_tokens=3)


CASE = Case(
    program,
    {"A: ": "1", "B: ": "2"},
    text="A: 1 B: 2",
    variables={"x": "1", "y": "2"},
    settings={"timeout": 60},
    programs=1,
)
