"""Text of a Lark grammar."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "> " + sgl.gen("x", constraint=sgl.Grammar('start: "x"~1..3 ("y" | "z")')) + " end"


CASE = Case(
    program, {"> ": "xxz"}, text="> xxz end", variables={"x": "xxz"}, blocking=False, programs=1
)
