"""A choice that is drawn by the run's seed."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A " + sgl.select("a", ["x", "y"], temperature=0.0001) + "."


CASE = Case(
    program,
    {"A ": "y"},
    text="A y.",
    variables={"a": "y"},
    settings={"seed": 1},
    blocking=False,
    programs=1,
)
