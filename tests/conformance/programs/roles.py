"""Turns, written as functions."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += sgl.system("Be brief.")
    s += sgl.user("Hi")
    s += sgl.assistant(sgl.gen("x", max_tokens=4))


CASE = Case(
    program,
    {"assistant": "Yo"},
    text="<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n",
    variables={"x": "Yo"},
    programs=1,
)
