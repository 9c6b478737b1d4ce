"""Text and generations after a fork, in the parent and in its branches in turn."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    branches = s.fork(2)
    s += " p1"
    branches += " c1"
    s += " p2=" + sgl.gen("p", max_tokens=2)
    branches += " c2=" + sgl.gen("c", max_tokens=2)
    s += " p3"
    branches += " c3"
    branches.join("concate_and_append")
    s += " p4=" + sgl.gen("q", max_tokens=2)


CASE = Case(
    program,
    {"p2=": "1", "c2=": "2", "p4=": "3"},
    text="Start. p1 p2=1 p3 c1 c2=2 c3 c1 c2=2 c3 p4=3",
    variables={"p": "1", "c": ["2", "2"], "q": "3"},
    programs=1,
)
