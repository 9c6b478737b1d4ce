"""Additions after a join, before and after reads, and another fork."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(2)
    branches += lambda i: f"{i}: "
    branches += sgl.gen("x", regex="[a-c]")
    branches.join("concate_and_append")
    s += " One " + sgl.gen("one", max_tokens=2)
    s += f" after {''.join(s['x'])} " + sgl.gen("two", max_tokens=2)
    again = s.fork(2)
    again += lambda i: f" {i}; " + sgl.gen("y", max_tokens=2)
    again.join()
    s += " End " + sgl.gen("three", max_tokens=2)


CASE = Case(
    program,
    {"0: ": "a", "1: ": "b", "One ": "1", "after ab ": "2", "0; ": "p", "1; ": "q", "End ": "3"},
    text="Start. 0: a1: b One 1 after ab 2 End 3",
    variables={"x": ["a", "b"], "y": ["p", "q"], "one": "1", "two": "2", "three": "3"},
    programs=1,
)
