"""A constraint that was made beforehand."""

import sglang_lite as sgl
from tests.conformance.case import Case

WORD = sgl.Regex("[a-c]{2,4}")


@sgl.function
def program(s):
    s += (
        "> "
        + sgl.gen("x", constraint=WORD)
        + " "
        + sgl.gen("y", constraint=sgl.Choices(("on", "off")))
    )


CASE = Case(
    program,
    {"> ": "abc", "abc ": "off"},
    text="> abc off",
    variables={"x": "abc", "y": "off"},
    programs=1,
)
