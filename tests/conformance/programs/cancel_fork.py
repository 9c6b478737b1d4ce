"""A branch is cancelled with the branches that it was forked into."""

import sglang_lite as sgl
from tests.conformance.case import Case, never


@sgl.function
def program(s):
    s += "Start. "
    left, right = s.fork(2)
    inner = left.fork(2)
    inner += "in " + sgl.gen("x", max_tokens=2, check=never)
    right += "R " + sgl.gen("y", max_tokens=2)
    left.cancel()
    s["failed"] = [type(branch.error()) for branch in inner]
    s += right["y"] + " End " + sgl.gen("w", max_tokens=2)


CASE = Case(
    program,
    {"in ": "1", "R ": "2", "End ": "3"},
    text="Start. 2 End 3",
    variables={"failed": [sgl.RequestAbortedError] * 2, "w": "3"},
    programs=1,
)
