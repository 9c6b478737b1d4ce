"""Generations at a temperature, from the run's seed."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += (
        "A: "
        + sgl.gen("a", temperature=1.5, top_p=0.9)
        + ". "
        + sgl.gen("b", temperature=0.7, top_k=5, min_p=0.01)
    )


CASE = Case(
    program, {"A: ": "x", ". ": "y"}, text="A: x. y", variables={"a": "x", "b": "y"}, programs=1
)
