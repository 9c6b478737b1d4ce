"""A fork of one."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    only = s.fork()
    only += "Go " + sgl.gen("x", max_tokens=3)
    only.join("concate_and_append")
    s += " on"


CASE = Case(program, {"Go ": "x"}, text="Start. Go x on", variables={"x": ["x"]}, programs=1)
