"""Selections that are drawn, each branch by a seed of its own."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(4)
    branches += lambda i: f"{i}? "
    branches += sgl.select("x", ["a", "b"], temperature=0.0001)
    branches += sgl.select("y", ["p", "q"], 0.0001, "greedy_token_selection")
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"0? ": "a", "1? ": "b", "2? ": "b", "3? ": "a", "a": "p", "b": "q"},
    text="Start. 0? ap1? bq2? bq3? ap",
    variables={"x": ["a", "b", "b", "a"], "y": ["p", "q", "q", "p"]},
    settings={"seed": 2},
    blocking=False,
    programs=1,
)
