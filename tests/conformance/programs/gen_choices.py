"""A generation among choices is a selection."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Is it? " + sgl.gen("x", choices=["yes", "no"]) + "."


CASE = Case(program, {"Is it? ": "no"}, text="Is it? no.", variables={"x": "no"}, programs=1)
