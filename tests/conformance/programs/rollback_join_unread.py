"""A rollback over a join of branches that nobody has waited for."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    with s.checkpoint() as place:
        branches = s.fork(2)
        branches += " one" + sgl.gen("x", max_tokens=2)
        branches.join("concate_and_append")
        s += " then " + sgl.gen("z", max_tokens=2)
        place.rollback()
        s += " two" + sgl.gen("y", max_tokens=2)
    s += "."


CASE = Case(
    program,
    {"one": "a", "two": "b", "then ": "c"},
    text="Start. twob.",
    variables={"x": sgl.UnknownVariableError, "z": sgl.UnknownVariableError, "y": "b"},
    streams=False,
    programs=1,
)
