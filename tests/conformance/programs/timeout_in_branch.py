"""A branch whose time is over fails who reads from it, and nobody else."""

import sglang_lite as sgl
from tests.conformance.case import Case, Never


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(3)
    branches += lambda i: f"{i}: " + sgl.gen("x", max_tokens=2)
    branches[1] += " late " + sgl.gen("y", backend=Never(), timeout=0.01)
    branches += "; " + sgl.gen("z", max_tokens=2)
    branches.join()
    s += "End " + sgl.gen("w", max_tokens=2)


CASE = Case(
    program,
    {"0: ": "a", "1: ": "b", "2: ": "c", "late ": "d", "; ": "e", "End ": "f"},
    text="Start. End f",
    variables={
        "x": ["a", "b", "c"],
        "y": sgl.RequestTimeoutError,
        "z": sgl.RequestTimeoutError,
        "w": "f",
    },
    programs=1,
)
