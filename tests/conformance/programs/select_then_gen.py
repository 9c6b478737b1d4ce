"""A generation behind a selection."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A " + sgl.select("a", ["x", "yy"]) + " B " + sgl.gen("b", max_tokens=4)


CASE = Case(
    program, {"A ": "yy", " B ": "1"}, text="A yy B 1", variables={"a": "yy", "b": "1"}, programs=1
)
