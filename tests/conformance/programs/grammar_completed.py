"""A generation without a constraint completes the open grammar."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    with s.grammar(sgl.Regex("<[a-c]{2}>")):
        s += "<" + sgl.gen("x")
    s += " then " + sgl.gen("y", max_tokens=2)


CASE = Case(
    program,
    {"<": "ab>", "then ": "z"},
    text="<ab> then z",
    variables={"x": "ab>", "y": "z"},
    blocking=False,
    programs=1,
)
