"""At least so many tokens."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += (
        "A: "
        + sgl.gen("a", min_tokens=4, max_tokens=6)
        + "|"
        + sgl.gen("b", min_tokens=2, max_tokens=2, stop="a")
    )


CASE = Case(
    program, {"A: ": "x", "|": "y"}, text="A: x|y", variables={"a": "x", "b": "y"}, programs=1
)
