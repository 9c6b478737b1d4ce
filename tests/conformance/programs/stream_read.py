"""Variables that the body follows piece by piece, its own and a branch's."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", max_tokens=3)
    s["pieces"] = "".join(s.text_iter("x")) == s["x"]
    branches = s.fork(2)
    branches += lambda i: f"{i}: " + sgl.gen("y", max_tokens=3)
    s["more"] = all("".join(branch.text_iter("y")) == branch["y"] for branch in branches)
    branches.join("concate_and_append")
    s += " End " + sgl.gen("z", max_tokens=2)


CASE = Case(
    program,
    {"A: ": "1 2", "0: ": "a b", "1: ": "c d", "End ": "z"},
    text="A: 1 20: a b1: c d End z",
    variables={"x": "1 2", "pieces": True, "y": ["a b", "c d"], "more": True, "z": "z"},
    programs=1,
)
