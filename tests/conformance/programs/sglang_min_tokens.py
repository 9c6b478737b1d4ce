"""SGLang's test of min_tokens."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def convo(s):
    s += sgl.user("What is the capital of the United States?")
    s += sgl.assistant(sgl.gen("answer", min_tokens=6, max_tokens=8))


CASE = Case(
    convo,
    {"States?": "It is Washington."},
    text="<|im_start|>user\nWhat is the capital of the United States?<|im_end|>\n"
    "<|im_start|>assistant\nIt is Washington.<|im_end|>\n",
    variables={"answer": "It is Washington."},
    programs=1,
)
