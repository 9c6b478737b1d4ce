"""A fork inside a fork, inside what is taken back."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    with s.checkpoint() as place:
        for turn in range(3):
            outer = s.fork(2)
            for i, branch in enumerate(outer):
                branch += f" {turn}{i}"
                inner = branch.fork(2)
                inner += lambda j: f"/{j}:"
                inner += sgl.gen("x", max_tokens=2)
                inner.join("concate_and_append")
            outer.join("concate_and_append")
            if turn == 1:
                s.sync()
            if turn < 2:
                place.rollback()
    s += " End " + sgl.gen("y", max_tokens=2)


CASE = Case(
    program,
    {"/0:": "a", "/1:": "b", "End ": "z"},
    text="Start. 20/0:a/1:b 21/0:a/1:b End z",
    variables={"x": [["a", "b"], ["a", "b"]], "y": "z"},
    streams=False,
    programs=1,
)
