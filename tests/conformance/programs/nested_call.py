"""A program that runs by itself inside another."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def ask(s, question):
    s += question + " " + sgl.gen("answer", regex="[a-c]")


@sgl.function
def program(s):
    s += "Start: "
    inner = s.call(ask, "One?")
    s += inner["answer"] + " " + sgl.gen("x", max_tokens=3)


CASE = Case(
    program,
    {"One? ": "b", "b ": "z"},
    text="Start: b z",
    variables={"x": "z", "answer": sgl.UnknownVariableError},
    programs=2,
)
