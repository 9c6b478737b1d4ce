"""A fork of 64."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(64)
    branches += lambda i: f"{i}: "
    branches += sgl.gen("x", max_tokens=2)
    branches.join()
    s += "Last " + sgl.gen("y", max_tokens=2)


CASE = Case(
    program,
    {": ": "v", "Last ": "w"},
    text="Start. Last w",
    variables={"x": ["v"] * 64, "y": "w"},
    programs=1,
)
