"""A branch of a branch that fails: its own branch is told where it joins, and nobody beside."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    left, right = s.fork(2)
    inner = left.fork(2)
    inner[0] += " bad" + sgl.gen("x", regex="[a-z]", check=lambda text: False)
    inner[1] += " fine" + sgl.gen("y", max_tokens=2)
    inner.join("concate_and_append")
    left += " after" + sgl.gen("z", max_tokens=2)
    right += " right" + sgl.gen("w", max_tokens=2)
    s["left"] = type(left.error())
    s["inner"] = type(inner[1].error())
    s += right["w"] + " End" + sgl.gen("v", max_tokens=2)


CASE = Case(
    program,
    {" bad": "b", " fine": "1", " right": "2", " End": "3"},
    text="Start.2 End3",
    variables={"left": sgl.ValueValidationError, "inner": type(None), "v": "3"},
    programs=1,
)
