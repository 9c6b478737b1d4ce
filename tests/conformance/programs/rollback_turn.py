"""A rollback takes turns back."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += sgl.system("S")
    with s.checkpoint() as place:
        s += sgl.user("One?") + sgl.assistant(sgl.gen("x", max_tokens=3))
        s.sync()
        place.rollback()
        s += sgl.user("Two?") + sgl.assistant(sgl.gen("y", max_tokens=3))


CASE = Case(
    program,
    {"One?": "a", "Two?": "b"},
    text="<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
    variables={"y": "b"},
    streams=False,
    programs=1,
)
