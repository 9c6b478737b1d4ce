"""Scopes inside one another, one of them of the other's name."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    with s.var_scope("out"):
        s += "a"
        with s.var_scope("in"):
            s += "b" + sgl.gen("x", max_tokens=2)
            with s.var_scope("out"):
                s += "c"
        s += "d"


CASE = Case(
    program, {"b": "1"}, text="ab1cd", variables={"out": "ab1cd", "in": "b1c", "x": "1"}, programs=1
)
