"""Text of more than one byte a character."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "é—日" + sgl.gen("x", max_tokens=4) + "日"


CASE = Case(program, {"日": "é—"}, text="é—日é—日", variables={"x": "é—"}, programs=1)
