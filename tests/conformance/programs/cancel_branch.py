"""A branch that is cancelled while it waits; the others, and the parent, continue."""

import sglang_lite as sgl
from tests.conformance.case import Case, never


@sgl.function
def program(s):
    s += "Start. "
    left, right = s.fork(2)
    left += "L " + sgl.gen("x", max_tokens=2, check=never)
    right += "R " + sgl.gen("y", max_tokens=2)
    left.cancel()
    left += "more " + sgl.gen("z", max_tokens=2)
    s["failed"] = type(left.error())
    s += right["y"] + " End " + sgl.gen("w", max_tokens=2)


CASE = Case(
    program,
    {"L ": "1", "R ": "2", "End ": "3"},
    text="Start. 2 End 3",
    variables={"failed": sgl.RequestAbortedError, "w": "3"},
    programs=1,
)
