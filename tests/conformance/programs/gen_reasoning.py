"""Reasoning that is split off the answer."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Q " + sgl.gen("x", reasoning="qwen3", max_tokens=20) + "."


CASE = Case(
    program,
    {"Q ": "<think>\nlong\n</think>\n\nshort"},
    text="Q <think>\nlong\n</think>\n\nshort.",
    variables={"x": "short", "x_reasoning_content": "long\n"},
    engine=False,
    programs=1,
)
