"""A generation that continues after the end of the sequence."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("a", ignore_eos=True, max_tokens=6) + "." + sgl.gen("b", max_tokens=2)


CASE = Case(
    program, {"A: ": "x", ".": "y"}, text="A: x.y", variables={"a": "x", "b": "y"}, programs=1
)
