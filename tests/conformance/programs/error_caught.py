"""An error of the body that is caught inside of it, in the middle of a scope and a turn."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += sgl.system("S")
    try:
        with s.user(), s.var_scope("part"):
            s += "Hi" + sgl.gen("x", max_tokens=2)
            raise KeyError("mine")
    except KeyError:
        s += sgl.user("Again")
    s += sgl.assistant(sgl.gen("y", max_tokens=2))


CASE = Case(
    program,
    {"Hi": "a", "assistant": "b"},
    text="<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHia<|im_end|>\n<|im_start|>user\nAgain<|im_end|>\n"
    "<|im_start|>assistant\nb<|im_end|>\n",
    variables={"x": "a", "y": "b", "part": "Hia"},
    programs=1,
)
