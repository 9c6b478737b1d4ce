"""One node that runs elsewhere."""

import sglang_lite as sgl
from tests.conformance.case import Case

ELSEWHERE = sgl.ScriptedBackend({"B: ": "there"})


@sgl.function
def program(s):
    s += (
        "A: "
        + sgl.gen("x", max_tokens=3)
        + " B: "
        + sgl.gen("y", backend=ELSEWHERE)
        + " C: "
        + sgl.gen("z", max_tokens=3)
    )


CASE = Case(
    program,
    {"A: ": "here", "C: ": "again"},
    text="A: here B: there C: again",
    variables={"x": "here", "y": "there", "z": "again"},
    programs=1,
)
