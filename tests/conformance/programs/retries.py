"""A backend that fails once."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", max_tokens=3, retries=1) + "."


CASE = Case(
    program,
    {"A: ": [sgl.OverloadedError("busy."), "fine"]},
    text="A: fine.",
    variables={"x": "fine"},
    programs=1,
)
