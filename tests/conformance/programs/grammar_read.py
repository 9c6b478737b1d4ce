"""A read in the middle of a grammar decides how it continues."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "> "
    with s.grammar(sgl.Regex("(ab|ba)-[0-9]{1,2}!")):
        s += sgl.gen("x", regex="ab|ba") + "-"
        if s["x"] == "ab":
            s += "1"
        s += sgl.gen("y", regex="[0-9]") + "!"
    s += " " + sgl.gen("z", max_tokens=2)


CASE = Case(
    program,
    {"> ": "ab", "-1": "7", "-": "3", "! ": "w"},
    text="> ab-17! w",
    variables={"x": "ab", "y": "7", "z": "w"},
    blocking=False,
    programs=1,
)
