"""A body that raises while its branches are under way."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("x", max_tokens=2)
    branches = s.fork(3)
    branches += sgl.gen("y", max_tokens=2)
    branches.join("concate_and_append")
    s["x"]
    raise KeyError("mine")


CASE = Case(program, {"A: ": "1", "1": "2"}, raises=KeyError, programs=1)
