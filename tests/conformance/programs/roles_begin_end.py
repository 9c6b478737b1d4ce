"""Turns with a beginning and an end."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += sgl.system("S") + sgl.user_begin() + "Hi" + sgl.user_end()
    s += sgl.assistant_begin() + sgl.gen("x", max_tokens=4) + sgl.assistant_end()


CASE = Case(
    program,
    {"assistant": "Yo"},
    text="<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n",
    variables={"x": "Yo"},
    programs=1,
)
