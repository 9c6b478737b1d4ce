"""SGLang's multi_turn_question."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def multi_turn_question(s, question_1, question_2):
    s += sgl.system("You help.")
    s += sgl.user(question_1)
    s += sgl.assistant(sgl.gen("answer_1", max_tokens=6))
    s += sgl.user(question_2)
    with s.assistant():
        s += sgl.gen("answer_2", max_tokens=6)


CASE = Case(
    multi_turn_question,
    {"First?": "One.", "Second?": "Two."},
    text="<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nFirst?<|im_end|>\n<|im_start|>assistant\nOne.<|im_end|>\n"
    "<|im_start|>user\nSecond?<|im_end|>\n<|im_start|>assistant\nTwo.<|im_end|>\n",
    variables={"answer_1": "One.", "answer_2": "Two."},
    arguments={"question_1": "First?", "question_2": "Second?"},
    programs=1,
)
