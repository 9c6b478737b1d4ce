"""Several answers, in branches, too."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A " + sgl.select("a", ["x", "y"], multi=True) + "\n"
    branches = s.fork(2)
    branches += lambda i: (
        f"{i} " + sgl.select("b", ["p", "q"], multi=True) + "! " + sgl.gen("c", max_tokens=2)
    )
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"A ": "x", "x": ", y", "0 ": "q", "q": "\n", "1 ": "p", "p": ", q", "p, q": "\n", "! ": "z"},
    text="A x, y\n0 q! z1 p, q! z",
    variables={"a": ["x", "y"], "b": [["q"], ["p", "q"]], "c": ["z", "z"]},
    blocking=False,
    programs=1,
)
