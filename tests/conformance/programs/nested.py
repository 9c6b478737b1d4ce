"""A program that continues another's text."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def ask(s, question, name):
    s += question + " " + sgl.gen(name, max_tokens=3) + ". "


@sgl.function
def program(s):
    s += "Start: "
    s += ask("One?", "a")
    s += ask("Two?", name="b")
    s += "End " + sgl.gen("c", max_tokens=3)


CASE = Case(
    program,
    {"One? ": "1", "Two? ": "2", "End ": "3"},
    text="Start: One? 1. Two? 2. End 3",
    variables={"a": "1", "b": "2", "c": "3"},
    programs=1,
)
