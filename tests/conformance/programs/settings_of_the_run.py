"""Settings of the run, and a node with its own over them."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("a") + "|" + sgl.gen("b", max_tokens=1, stop=";")


CASE = Case(
    program,
    {"A: ": "1 2 3\n4", "|": "5 6;7"},
    text="A: 1 2 3|5",
    variables={"a": "1 2 3", "b": "5"},
    settings={
        "stop": "\n",
        "temperature": 0.5,
        "top_p": 0.9,
        "frequency_penalty": 0.1,
        "ignore_eos": False,
    },
    programs=1,
)
