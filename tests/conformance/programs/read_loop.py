"""A loop that runs until a value says so."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    for i in range(5):
        s += f"{i}:" + sgl.gen("x", regex="more|done") + " "
        if s["x"] == "done":
            break
    s += "end"


CASE = Case(
    program,
    {":": ["more", "more", "done"]},
    text="0:more 1:more 2:done end",
    variables={"x": "done"},
    programs=1,
)
