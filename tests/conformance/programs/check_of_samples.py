"""A check of each of several samples, of which the first answers fail together."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", n=2, regex="[a-z]", check=lambda text: text != "a", retries=40) + "."
    s += sgl.gen("y", max_tokens=2)


CASE = Case(
    program,
    {"A: ": ["b", "a", "c", "d"], ".": "z"},
    text="A: c.z",
    variables={"x": ["c", "d"], "y": "z"},
    programs=1,
)
