"""A program that continues a branch's text, reads in it, and forks."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def ask(s, question):
    s += question + " " + sgl.gen("answer", regex="[a-c]")
    if s["answer"] == "b":
        inner = s.fork(2)
        inner += lambda i: f" {i}" + sgl.gen("why", max_tokens=1)
        inner.join("concate_and_append")
    s += ". "


@sgl.function
def program(s):
    s += "Start: "
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        branch += ask(f"Q{i}?")
    branches.join("concate_and_append")
    s += "End " + sgl.gen("x", max_tokens=2)


CASE = Case(
    program,
    {"Q0? ": "a", "Q1? ": "b", " 0": "p", " 1": "q", "End ": "z"},
    text="Start: Q0? a. Q1? b 0p 1q. End z",
    variables={"answer": ["a", "b"], "why": [None, ["p", "q"]], "x": "z"},
    programs=1,
)
