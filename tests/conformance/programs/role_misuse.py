"""A turn inside a turn is refused where it stands."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += sgl.system("S")
    with s.user():
        s += sgl.assistant("no")


CASE = Case(program, raises=sgl.ProgramError, programs=0)
