"""SGLang's separate_reasoning."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += sgl.user("Q") + sgl.assistant(
        sgl.separate_reasoning(sgl.gen("x", max_tokens=20), model_type="qwen3")
    )
    s += sgl.user("R") + sgl.assistant(sgl.gen("y", max_tokens=2))


CASE = Case(
    program,
    {
        "Q<|im_end|>\n<|im_start|>assistant\n": "<think>\nlong\n</think>\n\nshort",
        "R<|im_end|>\n<|im_start|>assistant\n": "z",
    },
    text="<|im_start|>user\nQ<|im_end|>\n"
    "<|im_start|>assistant\n<think>\nlong\n</think>\n\nshort<|im_end|>\n<|im_start|>user\nR<|im_end|>\n"
    "<|im_start|>assistant\nz<|im_end|>\n",
    variables={"x": "short", "x_reasoning_content": "long\n", "y": "z"},
    programs=1,
)
