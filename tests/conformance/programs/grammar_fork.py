"""Branches inside a grammar."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    with s.grammar(sgl.Regex("<[a-d]{1,4}>")):
        s += "<"
        branches = s.fork(2)
        branches += lambda i: "ab"[i]
        branches += sgl.gen("x", regex="[cd]")
        branches.join()
        s += sgl.gen("y", regex="[a-d]{1,4}") + ">"


CASE = Case(
    program,
    {"<": "abcd", "<a": "c", "<b": "d"},
    text="<abcd>",
    variables={"x": ["c", "d"], "y": "abcd"},
    blocking=False,
    programs=1,
)
