"""A copy of a branch."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        with branch.copy() as aside:
            aside += f"aside {i} " + sgl.gen("x", regex="[a-c]")
        branch += f"so {branch['x']} " + sgl.gen("y", max_tokens=2)
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"aside 0 ": "a", "aside 1 ": "b", "so a ": "p", "so b ": "q"},
    text="Start. so a pso b q",
    variables={"x": ["a", "b"], "y": ["p", "q"]},
    programs=1,
)
