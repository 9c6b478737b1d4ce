"""Programs that branches run by themselves."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def ask(s, question):
    s += question + " " + sgl.gen("answer", regex="[a-c]")


@sgl.function
def program(s):
    s += "Start: " + sgl.gen("x", max_tokens=2) + " "
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        branch += branch.call(ask, f"Q{i}?")["answer"] + " "
        branch += sgl.gen("y", max_tokens=2)
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"Start: ": "1", "Q0? ": "a", "Q1? ": "b", "a ": "p", "b ": "q"},
    text="Start: 1 a pb q",
    variables={"x": "1", "y": ["p", "q"]},
    programs=3,
)
