"""Branches of unequal lengths, some of which end long before others."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(4)
    for i, branch in enumerate(branches):
        for j in range(i * 2):
            branch += f"{i}.{j}=" + sgl.gen(f"x{j}", max_tokens=2) + " "
    branches.join("concate_and_append")
    s += "End " + sgl.gen("y", max_tokens=2)


CASE = Case(
    program,
    {"=": "v", "End ": "z"},
    text="Start. 1.0=v 1.1=v 2.0=v 2.1=v 2.2=v 2.3=v 3.0=v 3.1=v 3.2=v 3.3=v 3.4=v 3.5=v End z",
    variables={"x0": [None, "v", "v", "v"], "x5": [None, None, None, "v"], "y": "z"},
    programs=1,
)
