"""Patterns and token ids that end a generation."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("a", stop_regex="[0-9]x", max_tokens=3) + "|"
    s += sgl.gen("b", stop_regex=["b+", "c"], max_tokens=3) + "|"
    s += sgl.gen("c", stop_token_ids=[98, 99], max_tokens=3) + "|" + sgl.gen("d", max_tokens=2)


CASE = Case(
    program,
    {"A: ": "1", "1|": "2", "2|": "3", "3|": "4"},
    text="A: 1|2|3|4",
    variables={"a": "1", "b": "2", "c": "3", "d": "4"},
    programs=1,
)
