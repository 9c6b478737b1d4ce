"""Branches with one seed of their own, and without."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(2)
    branches += "A: " + sgl.gen("a", seed=5, temperature=1.0, max_tokens=4)
    s["same"] = branches[0]["a"] == branches[1]["a"]
    branches += "; " + sgl.gen("b", temperature=1.0, max_tokens=4)
    branches.join()


CASE = Case(
    program,
    {"A: ": "x", "; ": "y"},
    text="Start. ",
    variables={"a": ["x", "x"], "same": True, "b": ["y", "y"]},
    settings={"seed": 5},
    blocking=False,
    programs=1,
)
