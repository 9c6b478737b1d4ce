"""Branches that each take back what they have tried."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(3)
    for i, branch in enumerate(branches):
        branch += f"{i}: "
        with branch.checkpoint() as place:
            for _ in range(i):
                branch += "try " + sgl.gen("gone", max_tokens=4)
                place.rollback()
        branch += sgl.gen("x", max_tokens=2)
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"try ": "no", "0: ": "a", "1: ": "b", "2: ": "c"},
    text="Start. 0: a1: b2: c",
    variables={"x": ["a", "b", "c"], "gone": sgl.UnknownVariableError},
    streams=False,
    programs=1,
)
