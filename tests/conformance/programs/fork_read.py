"""A branch's value is read before another branch continues."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    first, second = s.fork(2)
    first += "1: " + sgl.gen("a", regex="[a-c]")
    second += f"2 after {first['a']}: " + sgl.gen("b", max_tokens=3)
    s += second["b"] + "!"
    s["a"] = first["a"]


CASE = Case(
    program, {"1: ": "b", "after b: ": "x"}, text="Start. x!", variables={"a": "b"}, programs=1
)
