"""A fork after a fork was joined."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    for name in ("x", "y"):
        branches = s.fork(2)
        branches += lambda i, name=name: f" {name}{i}:"
        branches += sgl.gen(name, max_tokens=2)
        branches.join("concate_and_append")


CASE = Case(
    program,
    {"x0:": "a", "x1:": "b", "y0:": "c", "y1:": "d"},
    text="Start. x0:a x1:b y0:c y1:d",
    variables={"x": ["a", "b"], "y": ["c", "d"]},
    programs=1,
)
