"""A grammar in each branch."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        with branch.grammar(sgl.Regex("<[ab]{1,3};(on|off)>")):
            branch += (
                "<"
                + sgl.gen("x", regex="[ab]{1,3}")
                + ";"
                + sgl.select("y", ["on", "off", "up"])
                + ">"
            )
        branch += f" {i} " + sgl.gen("z", max_tokens=2)
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"<": "ba", "ba;": "off", "0 ": "p", "1 ": "q"},
    text="Start.<ba;off> 0 p<ba;off> 1 q",
    variables={"x": ["ba", "ba"], "y": ["off", "off"], "z": ["p", "q"]},
    blocking=False,
    programs=1,
)
