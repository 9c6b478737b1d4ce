"""A bias of some tokens, and a penalty of repetition."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("a", logit_bias={98: 5.0, 99: -100}, max_tokens=4) + "|"
    s += sgl.gen("b", repetition_penalty=1.3, max_tokens=4)


CASE = Case(
    program,
    {"A: ": "x", "|": "y"},
    text="A: x|y",
    variables={"a": "x", "b": "y"},
    blocking=False,
    programs=1,
)
