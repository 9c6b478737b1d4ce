"""The parent adds on while its branches play."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(2)
    branches += sgl.gen("x", max_tokens=3)
    s += "Beside " + sgl.gen("y", max_tokens=3)
    branches.join("concate_and_append")
    s += "."


CASE = Case(
    program,
    {"Start. ": "b", "Beside ": "z"},
    text="Start. Beside zbb.",
    variables={"x": ["b", "b"], "y": "z"},
    programs=1,
)
