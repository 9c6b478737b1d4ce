"""Branches of which one asks elsewhere, in the middle of its own nodes."""

import sglang_lite as sgl
from tests.conformance.case import Case

ELSEWHERE = sgl.ScriptedBackend({"B: ": "there"})


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(2)
    branches[0] += "A: " + sgl.gen("x", regex="[a-c]") + " B: " + sgl.gen("y", backend=ELSEWHERE)
    branches[0] += f" {branches[0]['y']} " + sgl.gen("z", max_tokens=2)
    branches[1] += "C: " + sgl.gen("w", max_tokens=2)
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"A: ": "b", "there ": "c", "C: ": "d"},
    text="Start. A: b B: there there cC: d",
    variables={"x": ["b", None], "y": ["there", None], "z": ["c", None], "w": [None, "d"]},
    programs=1,
)
