"""SGLang's multi_document_qa: documents in branches, appended, then a question."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def multi_document_qa(s, docs, question):
    s += sgl.user_begin()
    s += "Answer by these documents.\n"
    forks = s.fork(len(docs))
    forks += lambda i: docs[i] + "\n"
    forks.join("concate_and_append")
    s += "Now answer. " + question + sgl.user_end()
    s += sgl.assistant(sgl.gen("answer", max_tokens=6))


CASE = Case(
    multi_document_qa,
    {"Who?": "Ann."},
    text="<|im_start|>user\nAnswer by these documents.\nAnn is.\nBob was.\nNow answer. Who?<|im_end|>\n"
    "<|im_start|>assistant\nAnn.<|im_end|>\n",
    variables={"answer": "Ann."},
    arguments={"docs": ("Ann is.", "Bob was."), "question": "Who?"},
    programs=1,
)
