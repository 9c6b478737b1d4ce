"""An image that the model can't see is refused at its line; the program continues."""

import sglang_lite as sgl
from tests.conformance.case import Case

PNG = b"\x89PNG\r\n\x1a\n"


@sgl.function
def program(s):
    s += sgl.user("One " + sgl.gen("x", max_tokens=2))
    try:
        s += sgl.user(sgl.image(PNG) + "Two")
    except sgl.CapabilityError:
        s += "none" + sgl.user_end()
    s += sgl.assistant(sgl.gen("y", max_tokens=2))


CASE = Case(
    program,
    {"One ": "1", "assistant": "2"},
    text="<|im_start|>user\nOne 1<|im_end|>\n<|im_start|>user\n<image>Two<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n",
    variables={"x": "1", "y": "2"},
    blocking=False,
    programs=1,
)
