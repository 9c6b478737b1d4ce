"""SGLang's answer_mt_bench: questions one after the other."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def answer_mt_bench(s, question_1, question_2):
    s += sgl.system("S")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=4))
    with s.user():
        s += question_2
    with s.assistant():
        s += sgl.gen("answer_2", max_tokens=4)


CASE = Case(
    answer_mt_bench,
    {"One?": "a", "Two?": "b"},
    text="<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n",
    variables={"answer_1": "a", "answer_2": "b"},
    arguments={"question_1": "One?", "question_2": "Two?"},
    settings={"temperature": 0.7},
    programs=1,
)
