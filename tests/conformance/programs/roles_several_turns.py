"""A conversation of several turns."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += sgl.system("Be brief.")
    for i in range(3):
        s += sgl.user(f"Question {i}")
        s += sgl.assistant(sgl.gen(f"a{i}", max_tokens=4))


def turn(i):
    return f"<|im_start|>user\nQuestion {i}<|im_end|>\n<|im_start|>assistant\n{i}!<|im_end|>\n"


CASE = Case(
    program,
    {f"Question {i}": f"{i}!" for i in range(3)},
    text="<|im_start|>system\nBe brief.<|im_end|>\n" + turn(0) + turn(1) + turn(2),
    variables={f"a{i}": f"{i}!" for i in range(3)},
    programs=1,
)
