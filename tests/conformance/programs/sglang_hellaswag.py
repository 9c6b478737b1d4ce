"""SGLang's few_shot_hellaswag: a choice of endings."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def few_shot_hellaswag(s, question, choices):
    s += "A man sits. He reads.\n"
    s += question
    s += sgl.select("answer", choices=choices)


CASE = Case(
    few_shot_hellaswag,
    {"A dog": " barks."},
    text="A man sits. He reads.\nA dog barks.",
    variables={"answer": " barks."},
    arguments={"question": "A dog", "choices": [" sings a song.", " barks.", " pays."]},
    settings={"temperature": 0},
    programs=1,
)
