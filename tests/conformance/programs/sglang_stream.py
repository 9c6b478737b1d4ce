"""SGLang's test of streams: a system turn, a question, an answer."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def qa(s, question):
    s += sgl.system("You are a helpful assistant.")
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer"))


CASE = Case(
    qa,
    {"Tell.": "A story in words."},
    text="<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nTell.<|im_end|>\n"
    "<|im_start|>assistant\nA story in words.<|im_end|>\n",
    variables={"answer": "A story in words."},
    arguments={"question": "Tell."},
    programs=1,
)
