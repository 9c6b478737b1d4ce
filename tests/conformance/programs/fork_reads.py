"""Branches that are read in turn while they continue."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(3)
    found = ""
    for turn in range(3):
        for i, branch in enumerate(branches):
            branch += f"{turn}{i}=" + sgl.gen("x", regex="[a-c]") + " "
        for branch in branches:
            found += branch["x"]
    s["found"] = len(found)
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"0=": "a", "1=": "b", "2=": "c"},
    text="Start. 00=a 10=a 20=a 01=b 11=b 21=b 02=c 12=c 22=c ",
    variables={"found": 9, "x": ["a", "b", "c"]},
    programs=1,
)
