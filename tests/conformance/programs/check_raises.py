"""A check that raises instead of a verdict."""

import sglang_lite as sgl
from tests.conformance.case import Case


class OwnError(Exception):
    pass


def broken(text):
    raise OwnError("mine")


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", max_tokens=2) + " B: " + sgl.gen("y", max_tokens=2, check=broken)
    s["failed"] = isinstance(s.error(), sgl.SglError)


CASE = Case(
    program,
    {"A: ": "1", "B: ": "2"},
    text=sgl.ProgramError,
    variables={"x": "1", "y": sgl.ProgramError, "failed": True},
    programs=1,
)
