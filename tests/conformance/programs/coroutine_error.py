"""A coroutine that catches what a branch failed with, and rolls back."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
async def program(s):
    s += "Start. "
    with s.checkpoint() as place:
        s += sgl.gen("x", regex="[a-c]", check=lambda text: False)
        try:
            await s.get("x")
        except sgl.ValueValidationError:
            place.rollback()
    s += "End " + sgl.gen("y", max_tokens=2)


CASE = Case(
    program,
    {"Start. ": "a", "End ": "z"},
    text="Start. End z",
    variables={"y": "z", "x": sgl.UnknownVariableError},
    streams=False,
    programs=1,
)
