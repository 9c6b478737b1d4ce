"""Turns so far, and what is known of a variable, read in the middle."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += sgl.system("S") + sgl.user("Hi") + sgl.assistant(sgl.gen("x", max_tokens=2))
    s["turns"] = len(s.messages())
    s["there"] = "x" in s and "y" not in s
    s += sgl.user("And?") + sgl.assistant(sgl.gen("y", max_tokens=2))


CASE = Case(
    program,
    {"Hi<|im_end|>\n<|im_start|>assistant\n": "a", "And?": "b"},
    text="<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
    variables={"turns": 3, "there": True, "x": "a", "y": "b"},
    programs=1,
)
