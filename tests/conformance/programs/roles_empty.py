"""Turns of nothing, and two generations in one."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += sgl.user() + sgl.assistant(sgl.gen("x", max_tokens=2))
    s += sgl.user("") + sgl.assistant(sgl.gen("y", max_tokens=2) + sgl.gen("z", max_tokens=2))


CASE = Case(
    program,
    {"assistant\n": ["a", "b"], "b": "c"},
    text="<|im_start|>user\n<|im_end|>\n"
    "<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\nbc<|im_end|>\n",
    variables={"x": "a", "y": "b", "z": "c"},
    programs=1,
)
