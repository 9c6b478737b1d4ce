"""Several samples: the variable is a list, the first one goes into the text."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("a", n=3, max_tokens=4) + "." + sgl.gen("b", max_tokens=4)


CASE = Case(
    program,
    {"A: ": ["1", "2", "3"], ".": "x"},
    text="A: 1.x",
    variables={"a": ["1", "2", "3"], "b": "x"},
    programs=1,
)
