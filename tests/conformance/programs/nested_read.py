"""A program that is read from inside another runs by itself."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def ask(s, question):
    s += question + " " + sgl.gen("answer", regex="[a-c]")


@sgl.function
def program(s):
    s += "Start: " + ask("One?")["answer"] + " " + sgl.gen("x", max_tokens=2)


CASE = Case(program, {"One? ": "b", "b ": "z"}, text="Start: b z", variables={"x": "z"}, programs=2)
