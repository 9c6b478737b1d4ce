"""A check that refuses the first answers."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Letter: " + sgl.gen("x", regex="[a-z]", check=lambda text: text > "a", retries=20) + "."


CASE = Case(
    program, {"Letter: ": ["a", "a", "k"]}, text="Letter: k.", variables={"x": "k"}, programs=1
)
