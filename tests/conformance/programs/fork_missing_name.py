"""A variable that only some branches make is None for the others."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(3)
    branches[1] += "only " + sgl.gen("x", max_tokens=3)
    branches.join()


CASE = Case(program, {"only ": "a"}, text="Start. ", variables={"x": [None, "a", None]}, programs=1)
