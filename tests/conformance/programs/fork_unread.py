"""Branches that nobody joins are played all the same; their variables stay theirs."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    for i, branch in enumerate(s.fork(2)):
        branch += f"{i}: " + sgl.gen("x", max_tokens=3)
    s += "End"


CASE = Case(
    program,
    {"0: ": "a", "1: ": "b"},
    text="Start. End",
    variables={"x": sgl.UnknownVariableError},
    programs=1,
)
