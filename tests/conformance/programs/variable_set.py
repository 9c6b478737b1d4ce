"""Variables that the body sets."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s["n"] = 3
    s.set_var("m", [1, 2])
    s += "x" * s["n"] + sgl.gen("a", max_tokens=3)


CASE = Case(
    program, {"xxx": "y"}, text="xxxy", variables={"n": 3, "m": [1, 2], "a": "y"}, programs=1
)
