"""A rollback takes back what branches have brought."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    with s.checkpoint() as place:
        branches = s.fork(2)
        branches += " one" + sgl.gen("x", max_tokens=2)
        branches.join("concate_and_append")
        s.sync()
        place.rollback()
        branches = s.fork(2)
        branches += " two" + sgl.gen("y", max_tokens=2)
        branches.join("concate_and_append")
    s += "."


CASE = Case(
    program,
    {"one": "a", "two": "b"},
    text="Start. twob twob.",
    variables={"x": sgl.UnknownVariableError, "y": ["b", "b"]},
    streams=False,
    programs=1,
)
