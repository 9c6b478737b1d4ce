"""Selections in branches."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(3)
    branches += lambda i: f"{i}? "
    branches += sgl.select("x", ["yes", "no"])
    branches += " since " + sgl.gen("why", max_tokens=3)
    branches.join()


CASE = Case(
    program,
    {"0? ": "yes", "1? ": "no", "2? ": "yes", "since ": "z"},
    text="Start. ",
    variables={"x": ["yes", "no", "yes"], "why": ["z"] * 3},
    programs=1,
)
