"""Turns as blocks, of text and generations in turn."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    with s.system():
        s += "Be "
        s += "brief."
    with s.user():
        s += "Hi"
    with s.assistant():
        s += "So: " + sgl.gen("x", max_tokens=4) + ", and "
        s += sgl.gen("y", max_tokens=4)


CASE = Case(
    program,
    {"So: ": "1", "and ": "2"},
    text="<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nSo: 1, and 2<|im_end|>\n",
    variables={"x": "1", "y": "2"},
    programs=1,
)
