"""Checks that are awaited."""

import asyncio

import sglang_lite as sgl
from tests.conformance.case import Case


async def later(text):
    await asyncio.sleep(0)
    return text != "a"


@sgl.function
def program(s):
    s += (
        "A: "
        + sgl.gen("x", regex="[a-z]", check=later, retries=20)
        + " B: "
        + sgl.gen("y", max_tokens=2, check=later)
    )


CASE = Case(
    program,
    {"A: ": ["a", "b"], "B: ": "2"},
    text="A: b B: 2",
    variables={"x": "b", "y": "2"},
    programs=1,
)
