"""The text so far, read in the middle."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "ab" + sgl.gen("x", max_tokens=3)
    s += f" [{len(s.text()) > 2}] " + sgl.gen("y", max_tokens=3)


CASE = Case(
    program, {"ab": "c", "] ": "d"}, text="abc [True] d", variables={"x": "c", "y": "d"}, programs=1
)
