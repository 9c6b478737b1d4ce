"""A variable for all that is added inside."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "("
    with s.var_scope("all"):
        s += "a" + sgl.gen("x", max_tokens=3) + "b"
    s += ")"


CASE = Case(program, {"a": "1"}, text="(a1b)", variables={"all": "a1b", "x": "1"}, programs=1)
