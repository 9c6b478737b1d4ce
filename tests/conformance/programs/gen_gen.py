"""Two generations, one right after the other."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A" + sgl.gen("a", max_tokens=3) + sgl.gen("b", max_tokens=3)


CASE = Case(program, {"A": "x", "x": "y"}, text="Axy", variables={"a": "x", "b": "y"}, programs=1)
