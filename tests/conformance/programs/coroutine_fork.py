"""A coroutine that reads its branches as they come."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
async def program(s):
    s += "Start. "
    branches = s.fork(3)
    branches += lambda i: f"{i}: "
    branches += sgl.gen("x", regex="[a-c]")
    s["found"] = sorted([await branch.get("x") for branch in branches])
    s += "End"


CASE = Case(
    program,
    {"0: ": "c", "1: ": "b", "2: ": "a"},
    text="Start. End",
    variables={},
    programs=1,
)
