"""A rollback to before a scope, and one to inside of it."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "a"
    with s.checkpoint() as before:
        with s.var_scope("gone"):
            s += "b" + sgl.gen("x", max_tokens=2)
        before.rollback()
        with s.var_scope("all"):
            s += "c"
            with s.checkpoint() as inside:
                s += "d" + sgl.gen("y", max_tokens=2)
                inside.rollback()
            s += "e" + sgl.gen("z", max_tokens=2)
    s += "."


CASE = Case(
    program,
    {"b": "1", "d": "2", "e": "3"},
    text="ace3.",
    variables={
        "all": "ce3",
        "z": "3",
        "gone": sgl.UnknownVariableError,
        "x": sgl.UnknownVariableError,
        "y": sgl.UnknownVariableError,
    },
    streams=False,
    programs=1,
)
