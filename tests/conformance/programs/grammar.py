"""Text, a generation and a selection in one language."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "List: "
    with s.grammar(sgl.Regex("([ab]{1,3}, ){2}(end|stop)[.]")):
        s += (
            "a, "
            + sgl.gen("x", regex="[ab]{1,3}")
            + ", "
            + sgl.select("y", ["end", "stop", "go"])
            + "."
        )
    s += " " + sgl.gen("z", max_tokens=3)


CASE = Case(
    program,
    {"a, ": "ba", "ba, ": "stop", "stop. ": "w"},
    text="List: a, ba, stop. w",
    variables={"x": "ba", "y": "stop", "z": "w"},
    blocking=False,
    programs=1,
)
