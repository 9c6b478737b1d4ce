"""A stop string ends a generation and is not part of it."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("a", stop="\n") + "|" + sgl.gen("b", stop=[",", "."])


CASE = Case(
    program,
    {"A: ": "x\ny", "|": "p, q."},
    text="A: x|p",
    variables={"a": "x", "b": "p"},
    programs=1,
)
