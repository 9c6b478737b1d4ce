"""Counts of tokens, of a node and of the run so far, read in the middle."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("a", max_tokens=3)
    s["one"] = s.usage("a").completion_tokens >= 0
    s["all"] = s.usage().prompt_tokens >= 0
    s += "|" + sgl.gen("b", max_tokens=3)


CASE = Case(
    program,
    {"A: ": "1", "|": "2"},
    text="A: 1|2",
    variables={"a": "1", "one": True, "all": True, "b": "2"},
    programs=1,
)
