"""Branches with turns of their own."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += sgl.system("S")
    branches = s.fork(2)
    for i, branch in enumerate(branches):
        branch += sgl.user(f"Tell {i}")
        branch += sgl.assistant(sgl.gen("x", max_tokens=3))
    branches.join()
    s += sgl.user("And?") + sgl.assistant(sgl.gen("y", max_tokens=3))


CASE = Case(
    program,
    {"Tell 0": "a", "Tell 1": "b", "And?": "c"},
    text="<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n",
    variables={"x": ["a", "b"], "y": "c"},
    programs=1,
)
