"""Branches whose texts are appended."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    branches = s.fork(3)
    branches += lambda i: f" {i}:"
    branches += sgl.gen("x", max_tokens=4)
    branches.join("concate_and_append")
    s += " End " + sgl.gen("y", max_tokens=4)


CASE = Case(
    program,
    {"0:": "a", "1:": "b", "2:": "c", "End ": "z"},
    text="Start. 0:a 1:b 2:c End z",
    variables={"x": ["a", "b", "c"], "y": "z"},
    programs=1,
)
