"""A program that is cancelled by its own body."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", max_tokens=3)
    s.sync()
    s += " B: " + sgl.gen("y", max_tokens=3)
    s["y"]
    s.cancel()


CASE = Case(
    program,
    {"A: ": "1", "B: ": "2"},
    text="A: 1 B: 2",
    variables={"x": "1", "y": "2"},
    streams=False,
    programs=1,
)
