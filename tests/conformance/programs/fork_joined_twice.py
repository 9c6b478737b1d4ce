"""One group that is joined in both modes."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    branches = s.fork(2)
    branches += lambda i: f" {i}=" + sgl.gen("x", max_tokens=2)
    branches.join()
    s += f" {len(s['x'])} of them:"
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"0=": "a", "1=": "b"},
    text="Start. 2 of them: 0=a 1=b",
    variables={"x": ["a", "b"]},
    programs=1,
)
