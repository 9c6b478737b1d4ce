"""Branches of a coroutine that each continue by what they read, all at once."""

import asyncio

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
async def program(s):
    s += "Start. "
    branches = s.fork(3)

    async def go(i):
        branch = branches[i]
        branch += f"{i}: " + sgl.gen("x", regex="[a-c]")
        branch += f" so {await branch.get('x')} " + sgl.gen("y", max_tokens=2)
        return await branch.get("x")

    s["found"] = len(await asyncio.gather(*(go(i) for i in range(3))))
    branches.join("concate_and_append")
    s += " End " + sgl.gen("z", max_tokens=2)


CASE = Case(
    program,
    {"0: ": "a", "1: ": "b", "2: ": "c", "so a ": "p", "so b ": "q", "so c ": "r", "End ": "z"},
    text="Start. 0: a so a p1: b so b q2: c so c r End z",
    variables={"found": 3, "x": ["a", "b", "c"], "y": ["p", "q", "r"], "z": "z"},
    programs=1,
)
