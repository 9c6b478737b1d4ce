"""A rollback to before a fork of which a branch has failed."""

import sglang_lite as sgl
from tests.conformance.case import Case


def refuses(text):
    return False


@sgl.function
def program(s):
    s += "Start."
    with s.checkpoint() as place:
        branches = s.fork(2)
        branches[0] += " good" + sgl.gen("x", max_tokens=2)
        branches[1] += " bad" + sgl.gen("y", max_tokens=2, check=refuses)
        branches.join("concate_and_append")
        if s.error() is not None:
            place.rollback()
    s += " On " + sgl.gen("z", max_tokens=2)


CASE = Case(
    program,
    {"good": "1", "bad": "2", "On ": "3"},
    text="Start. On 3",
    variables={"z": "3", "x": sgl.UnknownVariableError, "y": sgl.UnknownVariableError},
    streams=False,
    programs=1,
)
