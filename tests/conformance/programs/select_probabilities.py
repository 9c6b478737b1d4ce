"""Probabilities and scores of a selection, read in the middle."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A " + sgl.select("a", ["x", "y"])
    s["most"] = max(s.selection("a").probs.values()) > 0
    s["of"] = sorted(score.text for score in s.selection("a").scores)
    s += ". " + sgl.gen("b", max_tokens=2)


CASE = Case(
    program,
    {"A ": "y", ". ": "z"},
    text="A y. z",
    variables={"a": "y", "most": True, "of": ["x", "y"], "b": "z"},
    blocking=False,
    programs=1,
)
