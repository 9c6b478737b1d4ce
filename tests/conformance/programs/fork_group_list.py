"""A group that is given a list, one item a branch."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    branches = s.fork(2)
    branches += [" left " + sgl.gen("x", max_tokens=2), " right " + sgl.select("y", ["p", "q"])]
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"left ": "a", "right ": "q"},
    text="Start. left a right q",
    variables={"x": ["a", None], "y": [None, "q"]},
    programs=1,
)
