"""SGLang's whole number: the result is text."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Number " + sgl.gen_int("x") + ","


CASE = Case(program, {"Number ": "42"}, text="Number 42,", variables={"x": "42"}, programs=1)
