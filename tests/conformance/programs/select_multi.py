"""Several choices, until the end scores better."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A " + sgl.select("a", ["x", "y"], multi=True) + "."


CASE = Case(
    program,
    {"A ": "x", "x": ", y", ", y": "\n"},
    text="A x, y.",
    variables={"a": ["x", "y"]},
    blocking=False,
    programs=1,
)
