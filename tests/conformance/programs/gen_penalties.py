"""Penalties count what a generation itself has written."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "aaa " + sgl.gen("a", frequency_penalty=0.5, presence_penalty=0.5, max_tokens=8)
    s += " then " + sgl.gen("b", frequency_penalty=-0.5, max_tokens=8)


CASE = Case(
    program,
    {"aaa ": "x", "then ": "y"},
    text="aaa x then y",
    variables={"a": "x", "b": "y"},
    programs=1,
)
