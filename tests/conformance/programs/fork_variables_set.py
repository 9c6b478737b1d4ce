"""Variables that branches set by hand."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s["n"] = 1
    s += "Start. "
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        branch["n"] = branch["n"] + i
        branch += f"{branch['n']}: " + sgl.gen("x", max_tokens=2)
    branches.join()


CASE = Case(
    program,
    {"1: ": "a", "2: ": "b"},
    text="Start. ",
    variables={"n": [1, 2], "x": ["a", "b"]},
    programs=1,
)
