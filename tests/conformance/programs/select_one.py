"""A choice among texts."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Sky: " + sgl.select("x", ["blue", "green", "red"]) + "."


CASE = Case(program, {"Sky: ": "green"}, text="Sky: green.", variables={"x": "green"}, programs=1)
