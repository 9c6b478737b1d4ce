"""A selection none of whose choices the open grammar has a place for."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "> " + sgl.gen("x", max_tokens=2)
    try:
        with s.grammar(sgl.Regex("[ab]{3}")):
            s += "a" + sgl.select("y", ["x", "z"])
    except sgl.ConstraintError:
        s["refused"] = True


CASE = Case(
    program,
    {"> ": "1"},
    text=sgl.ConstraintError,
    variables={"x": "1", "y": sgl.ConstraintError},
    blocking=False,
    programs=1,
)
