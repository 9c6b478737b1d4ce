"""A branch that nothing is added to."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    branches = s.fork(3)
    branches[1] += " only" + sgl.gen("x", max_tokens=2)
    branches.join("concate_and_append")
    s += "." + sgl.gen("y", max_tokens=2)


CASE = Case(
    program,
    {"only": "1", "1.": "2"},
    text="Start. only1.2",
    variables={"x": [None, "1", None], "y": "2"},
    programs=1,
)
