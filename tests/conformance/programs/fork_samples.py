"""Several samples in each branch, then text and a generation."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(2)
    branches += lambda i: f"{i}: "
    branches += sgl.gen("x", n=2, max_tokens=2) + "." + sgl.gen("y", max_tokens=2)
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"0: ": ["a", "b"], "1: ": ["c", "d"], ".": "z"},
    text="Start. 0: a.z1: c.z",
    variables={"x": [["a", "b"], ["c", "d"]], "y": ["z", "z"]},
    programs=1,
)
