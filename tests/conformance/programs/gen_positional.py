"""SGLang's order of parameters."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("a", 4, 0, 1, "\n", None, None, 0.5, 0.9)
    s += "B: " + sgl.gen_int("b", 8, 1) + ";C: " + sgl.gen_string("c", 24, stop="\n") + "."


CASE = Case(
    program,
    {"A: ": "1\n2", "B: ": "7", "C: ": '"x"'},
    text='A: 1B: 7;C: "x".',
    variables={"a": "1", "b": "7", "c": '"x"'},
    programs=1,
)
