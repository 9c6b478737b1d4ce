"""A fork whose branch failed, and one after it that is played all the same."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    s.fork(1)[0] += "bad " + sgl.gen("x", regex="[a-z]", check=lambda text: False)
    branches = s.fork(2)
    branches += "good " + sgl.gen("y", max_tokens=2)
    branches.join()


CASE = Case(
    program, {"bad ": "b", "good ": "1"}, text="Start. ", variables={"y": ["1", "1"]}, programs=1
)
