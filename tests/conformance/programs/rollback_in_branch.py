"""A rollback inside a branch concerns that branch."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        with branch.checkpoint() as place:
            branch += " x" + sgl.gen("x", regex="[a-c]")
            if i == 0:
                branch.sync()
                place.rollback()
                branch += " y" + sgl.gen("y", regex="[a-c]")
    branches.join("concate_and_append")


CASE = Case(
    program,
    {" x": "a", " y": "b"},
    text="Start. yb xa",
    variables={"y": ["b", None], "x": [None, "a"]},
    streams=False,
    programs=1,
)
