"""A generation of no tokens is empty."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A" + sgl.gen("a", max_tokens=0) + "B" + sgl.gen("b")


CASE = Case(program, {"A": "x", "B": "y"}, text="ABy", variables={"a": "", "b": "y"}, programs=1)
