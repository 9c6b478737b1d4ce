"""A body that is a coroutine."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
async def program(s):
    s += "A: " + sgl.gen("x", regex="[a-c]")
    if await s.get("x") == "b":
        s += " B: " + sgl.gen("y", max_tokens=3)
    else:
        s += " C: " + sgl.gen("y", max_tokens=3)


CASE = Case(
    program,
    {"A: ": "b", "B: ": "1", "C: ": "2"},
    text="A: b B: 1",
    variables={"x": "b", "y": "1"},
    programs=1,
)
