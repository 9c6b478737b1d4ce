"""A generation with a seed of its own."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("a", seed=11, max_tokens=6) + "; " + sgl.gen("b", max_tokens=6)


CASE = Case(
    program,
    {"A: ": "x", "; ": "y"},
    text="A: x; y",
    variables={"a": "x", "b": "y"},
    settings={"seed": 5},
    blocking=False,
    programs=1,
)
