"""Empty texts are nothing."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += ""
    s += "a" + sgl.gen("x") + ""
    s += ""


CASE = Case(program, {"a": "1"}, text="a1", variables={"x": "1"}, programs=1)
