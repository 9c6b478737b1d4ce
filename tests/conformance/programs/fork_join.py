"""Branches whose variables are gathered."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(3)
    for i, branch in enumerate(branches):
        branch += f"{i}: " + sgl.gen("x", max_tokens=4)
    branches.join()
    s += "End " + sgl.gen("y", max_tokens=4)


CASE = Case(
    program,
    {"0: ": "a", "1: ": "b", "2: ": "c", "End ": "z"},
    text="Start. End z",
    variables={"x": ["a", "b", "c"], "y": "z"},
    programs=1,
)
