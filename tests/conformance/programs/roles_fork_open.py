"""Branches forked inside a turn, one of which ends it and begins another."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += sgl.system("S") + sgl.user_begin() + "Ask "
    branches = s.fork(2)
    branches += lambda i: f"{i}" + sgl.user_end() + sgl.assistant(sgl.gen("x", max_tokens=2))
    branches.join()
    s += "both" + sgl.user_end() + sgl.assistant(sgl.select("y", ["yes", "no"]))


CASE = Case(
    program,
    {"Ask 0": "a", "Ask 1": "b", "both": "no"},
    text="<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nAsk both<|im_end|>\n<|im_start|>assistant\nno<|im_end|>\n",
    variables={"x": ["a", "b"], "y": "no"},
    programs=1,
)
