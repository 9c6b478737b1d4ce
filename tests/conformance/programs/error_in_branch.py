"""A branch that fails fails who reads from it, and nobody else."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    good, bad = s.fork(2)
    good += "good " + sgl.gen("x", max_tokens=3)
    bad += "bad " + sgl.gen("y", regex="[a-z]", check=lambda text: False)
    s["failed"] = type(bad.error())
    s += "Still " + sgl.gen("z", max_tokens=3)
    s["x"] = len(good["x"]) > 0


CASE = Case(
    program,
    {"good ": "1", "bad ": "b", "Still ": "3"},
    text="Start. Still 3",
    variables={"x": True, "failed": sgl.ValueValidationError, "z": "3"},
    programs=1,
)
