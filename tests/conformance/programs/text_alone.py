"""Text without a generation."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Only "
    s += "text."


CASE = Case(program, text="Only text.", programs=0)
