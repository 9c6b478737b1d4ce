"""Selections by each method, side by side."""

import sglang_lite as sgl
from tests.conformance.case import Case

METHODS = (
    sgl.token_length_normalized,
    sgl.greedy_token_selection,
    sgl.unconditional_likelihood_normalized,
)


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(3)
    for i, branch in enumerate(branches):
        branch += f"{i}? " + sgl.select("x", ["ab", "abb", "b"], choices_method=METHODS[i])
        branch += ", " + sgl.gen("y", max_tokens=2)
    branches.join()


CASE = Case(
    program,
    {"0? ": "b", "1? ": "ab", "2? ": "abb", ", ": "z"},
    text="Start. ",
    variables={"x": ["b", "ab", "abb"], "y": ["z"] * 3},
    programs=1,
)
