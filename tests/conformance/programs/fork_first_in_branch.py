"""Only a branch of a branch generates."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    outer = s.fork(2)
    inner = outer[1].fork(2)
    inner += lambda j: f" {j}=" + sgl.gen("x", max_tokens=2)
    inner.join()
    outer.join()


CASE = Case(
    program, {"0=": "a", "1=": "b"}, text="Start.", variables={"x": [None, ["a", "b"]]}, programs=1
)
