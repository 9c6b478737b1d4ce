"""An assistant's turn that has begun."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += sgl.system("S") + sgl.user("Hi")
    s += sgl.assistant("Well, " + sgl.gen("x", max_tokens=4))


CASE = Case(
    program,
    {"Well, ": "yo"},
    text="<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWell, yo<|im_end|>\n",
    variables={"x": "yo"},
    programs=1,
)
