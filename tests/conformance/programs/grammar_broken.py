"""Text that the open grammar has no place for."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    with s.grammar(sgl.Regex("[ab]{3}")):
        s += "a"
        s += "x"


CASE = Case(program, raises=sgl.ConstraintError, blocking=False, programs=0)
