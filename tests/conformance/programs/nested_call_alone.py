"""A program whose only generation is that of another, which it runs by itself."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def ask(s, question):
    s += question + " " + sgl.gen("answer", regex="[a-c]")


@sgl.function
def program(s):
    s += "It says: " + s.call(ask, "One?")["answer"]


CASE = Case(program, {"One? ": "b"}, text="It says: b", programs=1)
