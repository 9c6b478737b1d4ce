"""A scope that a branch opens and one that is open at the fork."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    with s.var_scope("all"):
        s += "a"
        branches = s.fork(2)
        for i, branch in enumerate(branches):
            with branch.var_scope("own"):
                branch += f"[{i}" + sgl.gen("x", max_tokens=2) + "]"
        branches.join("concate_and_append")
    s += "."


CASE = Case(
    program,
    {"[0": "p", "[1": "q"},
    text="a[0p][1q].",
    variables={"all": "a[0p][1q]", "own": ["[0p]", "[1q]"], "x": ["p", "q"]},
    programs=1,
)
