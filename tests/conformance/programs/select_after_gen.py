"""A selection behind a generation."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A " + sgl.gen("a", max_tokens=4) + " B " + sgl.select("b", ["x", "yy"])


CASE = Case(
    program, {"A ": "1", " B ": "yy"}, text="A 1 B yy", variables={"a": "1", "b": "yy"}, programs=1
)
