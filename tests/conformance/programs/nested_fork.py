"""A program that forks, inside a branch of another."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def two(s, name):
    inner = s.fork(2)
    inner += lambda i: f" {i}="
    inner += sgl.gen(name, max_tokens=2)
    inner.join("concate_and_append")


@sgl.function
def program(s):
    s += "Start."
    branches = s.fork(2)
    for branch in branches:
        branch += two("x")
    branches.join("concate_and_append")
    s += " End"


CASE = Case(
    program,
    {"0=": "a", "1=": "b"},
    text="Start. 0=a 1=b 0=a 1=b End",
    variables={"x": [["a", "b"], ["a", "b"]]},
    programs=1,
)
