"""A scope around a fork whose variables are gathered, and one inside of each branch that is open at
a fork.
"""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    with s.var_scope("all"):
        s += "a"
        branches = s.fork(2)
        for i, branch in enumerate(branches):
            with branch.var_scope("own"):
                branch += f"[{i}"
                inner = branch.fork(2)
                inner += sgl.gen("x", max_tokens=2)
                inner.join("concate_and_append")
                branch += "]"
        branches.join()
        s += "b" + sgl.gen("y", max_tokens=2)
    s += "."


CASE = Case(
    program,
    {"[0": "p", "[1": "q", "b": "z"},
    text="abz.",
    variables={"all": "abz", "own": ["[0pp]", "[1qq]"], "x": [["p", "p"], ["q", "q"]], "y": "z"},
    programs=1,
)
