"""The best of several branches, by a value that each one gives."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Write. "
    branches = s.fork(3)
    for i, branch in enumerate(branches):
        branch += (
            f"{i}) " + sgl.gen("draft", max_tokens=3) + " Mark: " + sgl.gen("mark", regex="[1-9]")
        )
    best = max(range(3), key=lambda i: branches[i]["mark"])
    s += "Best: " + branches[best]["draft"]
    s["best"] = best


CASE = Case(
    program,
    {"0) ": "a", "1) ": "b", "2) ": "c", "a Mark: ": "3", "b Mark: ": "7", "c Mark: ": "5"},
    text="Write. Best: b",
    variables={"best": 1},
    programs=1,
)
