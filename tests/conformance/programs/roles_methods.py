"""Turns as methods of the state."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s.system("S")
    s += s.user("Hi")
    s.assistant(sgl.select("x", ["yes", "no"]))


CASE = Case(
    program,
    {"assistant": "no"},
    text="<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n",
    variables={"x": "no"},
    programs=1,
)
