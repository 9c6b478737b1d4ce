"""A stop string that is kept."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("a", stop="e", include_stop=True) + "!" + sgl.gen("b", max_tokens=3)


CASE = Case(
    program,
    {"A: ": "one two", "!": "z"},
    text="A: one!z",
    variables={"a": "one", "b": "z"},
    blocking=False,
    programs=1,
)
