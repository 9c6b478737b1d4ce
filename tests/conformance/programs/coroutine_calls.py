"""Coroutines that a coroutine runs by themselves, side by side."""

import asyncio

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
async def ask(s, question):
    s += question + " " + sgl.gen("answer", regex="[a-c]")
    await s.get("answer")


@sgl.function
async def program(s):
    s += "Start: "
    found = await asyncio.gather(*(s.call(ask, f"Q{i}?") for i in range(3)))
    s += "".join([await state.get("answer") for state in found]) + " " + sgl.gen("x", max_tokens=2)


CASE = Case(
    program,
    {"Q0? ": "a", "Q1? ": "b", "Q2? ": "c", "abc ": "z"},
    text="Start: abc z",
    variables={"x": "z"},
    programs=4,
)
