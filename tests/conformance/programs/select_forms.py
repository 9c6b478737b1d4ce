"""All ways to write a selection."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "1 " + sgl.select("a", ["x", "y"]) + " 2 " + sgl.select("b", (c for c in "xy"))
    s += " 3 " + sgl.select(choices=["x", "y"])
    s += " 4 " + sgl.select("d", ["x", "y"], 0.0, "greedy_token_selection")
    s += " 5 " + sgl.select("e", ["x", "y"], choices_method="unconditional_likelihood_normalized")
    s += " 6 " + sgl.gen("f", choices=("x", "y"), choices_method=sgl.greedy_token_selection)
    s += " 7 " + sgl.gen("g", choices=["x"])


CASE = Case(
    program,
    {"1 ": "y", "2 ": "x", "3 ": "y", "4 ": "x", "5 ": "y", "6 ": "x", "7 ": "x"},
    text="1 y 2 x 3 y 4 x 5 y 6 x 7 x",
    variables={"a": "y", "b": "x", "d": "x", "e": "y", "f": "x", "g": "x"},
    programs=1,
)
