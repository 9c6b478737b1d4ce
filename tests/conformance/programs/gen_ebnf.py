"""Text of a GBNF grammar."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += (
        "> "
        + sgl.gen("x", constraint=sgl.Grammar('root ::= ("ab" | "ba") root2\nroot2 ::= "!" | "?"'))
        + " end"
    )


CASE = Case(
    program, {"> ": "ba!"}, text="> ba! end", variables={"x": "ba!"}, blocking=False, programs=1
)
