"""Branches of branches."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        branch += f" {i}"
        inner = branch.fork(2)
        inner += lambda j: f"/{j}:"
        inner += sgl.gen("x", max_tokens=2)
        inner.join("concate_and_append")
        branch += ";" + sgl.gen("y", max_tokens=2)
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"/0:": "a", "/1:": "b", ";": "c"},
    text="Start. 0/0:a/1:b;c 1/0:a/1:b;c",
    variables={"x": [["a", "b"], ["a", "b"]], "y": ["c", "c"]},
    programs=1,
)
