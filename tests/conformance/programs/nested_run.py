"""Programs that a body runs by themselves, one of them of text alone."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def ask(s, question):
    s += question + " " + sgl.gen("answer", regex="[a-c]")


@sgl.function
def tell(s):
    s += "text"


@sgl.function
def program(s):
    s += tell.run().text() + " "
    found = [ask.run(f"Q{i}?") for i in range(2)]
    s += "".join(state["answer"] for state in found) + " " + sgl.gen("x", max_tokens=2)


CASE = Case(
    program,
    {"Q0? ": "a", "Q1? ": "b", "ab ": "z"},
    text="text ab z",
    variables={"x": "z"},
    programs=3,
)
