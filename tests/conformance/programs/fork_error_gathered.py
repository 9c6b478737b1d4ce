"""A failed branch's variables are gathered: only who reads those is told."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(3)
    branches += lambda i: f"{i}: "
    for i, branch in enumerate(branches):
        branch += sgl.gen("x", regex="[a-z]") + sgl.gen(
            "y", regex="[a-z]", check=lambda text, i=i: i != 1
        )
    branches.join()
    s += "End " + sgl.gen("z", max_tokens=2)


CASE = Case(
    program,
    {"0: ": "a", "1: ": "b", "2: ": "c", "a": "p", "b": "q", "c": "r", "End ": "3"},
    text="Start. End 3",
    variables={"x": ["a", "b", "c"], "y": sgl.ValueValidationError, "z": "3"},
    programs=1,
)
