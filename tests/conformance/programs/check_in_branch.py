"""Checks in branches, of which one refuses the first answers."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        branch += f"{i}: "
        branch += (
            sgl.gen("x", regex="[a-z]", check=lambda text: text > "a", retries=20)
            + "."
            + sgl.gen("y", max_tokens=2)
        )
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"0: ": ["a", "b"], "1: ": "c", ".": "z"},
    text="Start. 0: b.z1: c.z",
    variables={"x": ["b", "c"], "y": ["z", "z"]},
    programs=1,
)
