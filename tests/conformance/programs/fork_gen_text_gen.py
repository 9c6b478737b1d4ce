"""Branches with several generations each."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(8)
    for i, branch in enumerate(branches):
        branch += f"{i}: " + sgl.gen("a", max_tokens=3) + " and " + sgl.gen("b", max_tokens=3)
    branches.join()


CASE = Case(
    program,
    {"and ": "z", **{f"{i}: ": f"v{i}" for i in range(8)}},
    text="Start. ",
    variables={"a": [f"v{i}" for i in range(8)], "b": ["z"] * 8},
    programs=1,
)
