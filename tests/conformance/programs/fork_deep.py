"""Forks in forks in forks in forks."""

import sglang_lite as sgl
from tests.conformance.case import Case


def grow(branch, depth):
    if depth == 4:
        return
    inner = branch.fork(2)
    for i, each in enumerate(inner):
        each += f"{i}"
        each += sgl.gen(f"x{depth}", max_tokens=1)
        grow(each, depth + 1)
    inner.join("concate_and_append")


@sgl.function
def program(s):
    s += "Start "
    grow(s, 0)


CASE = Case(
    program,
    {"0": "a", "1": "b"},
    text="Start "
    + "0a"
    + "0a0a0a1b1b0a1b"
    + "1b0a0a1b1b0a1b"
    + "1b"
    + "0a0a0a1b1b0a1b"
    + "1b0a0a1b1b0a1b",
    variables={"x0": ["a", "b"], "x1": [["a", "b"], ["a", "b"]]},
    programs=1,
)
