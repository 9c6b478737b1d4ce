"""A branch whose variables are the state's own."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    with s.copy() as c:
        c += "Aside " + sgl.gen("x", max_tokens=3)
    s += "On " + sgl.gen("y", max_tokens=3)


CASE = Case(
    program,
    {"Aside ": "a", "On ": "b"},
    text="Start. On b",
    variables={"x": "a", "y": "b"},
    programs=1,
)
