"""A program that has failed works again from before."""

import sglang_lite as sgl
from tests.conformance.case import Case


def refuses(text):
    return False


@sgl.function
def program(s):
    s += "a"
    with s.checkpoint() as place:
        s += sgl.gen("x", max_tokens=3, check=refuses)
        if s.error() is not None:
            place.rollback()
    s += "b" + sgl.gen("y", max_tokens=3)


CASE = Case(
    program,
    {"a": "1", "ab": "2"},
    text="ab2",
    variables={"x": sgl.UnknownVariableError, "y": "2"},
    streams=False,
    programs=1,
)
