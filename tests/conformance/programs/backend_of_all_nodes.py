"""A run all of whose nodes are asked elsewhere."""

import sglang_lite as sgl
from tests.conformance.case import Case

ELSEWHERE = sgl.ScriptedBackend({"A: ": "1", "B: ": "2"})


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", backend=ELSEWHERE)
    s += " B: " + sgl.gen("y", backend=ELSEWHERE)


CASE = Case(program, text="A: 1 B: 2", variables={"x": "1", "y": "2"}, programs=0)
