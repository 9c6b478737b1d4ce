"""An image in a turn."""

import sglang_lite as sgl
from tests.conformance.case import Case

PNG = b"\x89PNG\r\n\x1a\n"


@sgl.function
def program(s):
    s += sgl.system("S") + sgl.user(sgl.image(PNG) + "What is it?")
    s += sgl.assistant(sgl.gen("x", max_tokens=3))


CASE = Case(
    program,
    {"What is it?": "a cat"},
    text="<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n<image>What is it?<|im_end|>\n<|im_start|>assistant\na cat<|im_end|>\n",
    variables={"x": "a cat"},
    blocking=False,
    engine=False,
    programs=0,
)
