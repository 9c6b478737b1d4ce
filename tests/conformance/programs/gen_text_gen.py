"""Generations with text between them, in one expression."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("a") + "\nB: " + sgl.gen("b") + "\nC: " + sgl.gen("c")


CASE = Case(
    program,
    {"A: ": "1", "B: ": "2", "C: ": "3"},
    text="A: 1\nB: 2\nC: 3",
    variables={"a": "1", "b": "2", "c": "3"},
    programs=1,
)
