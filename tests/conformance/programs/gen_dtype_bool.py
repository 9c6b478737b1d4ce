"""SGLang's dtype of truth values: the result is text."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "So: " + sgl.gen("x", dtype=bool) + "."


CASE = Case(program, {"So: ": "True"}, text="So: True.", variables={"x": "True"}, programs=1)
