"""Branches inside a turn."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += sgl.system("S") + sgl.user("Give two.")
    with s.assistant():
        s += "I say: "
        branches = s.fork(2)
        branches += lambda i: f"{i}) "
        branches += sgl.gen("x", max_tokens=3)
        branches.join("concate_and_append")
        s += " = " + sgl.gen("y", max_tokens=3)


CASE = Case(
    program,
    {"0) ": "a", "1) ": "b", " = ": "c"},
    text="<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nGive two.<|im_end|>\n"
    "<|im_start|>assistant\nI say: 0) a1) b = c<|im_end|>\n",
    variables={"x": ["a", "b"], "y": "c"},
    programs=1,
)
