"""SGLang's parallel_encoding: contexts that are read in branches and appended."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def parallel_encoding(s, question, contexts):
    forks = s.fork(len(contexts))
    forks += lambda i: f"Context {i}: {contexts[i]}\n"
    forks.join(mode="concate_and_append")
    s += "Question: " + question + "\nAnswer:" + sgl.gen("answer", max_tokens=4, stop=["\n"])


CASE = Case(
    parallel_encoding,
    {"Answer:": " c\n"},
    text="Context 0: a\nContext 1: b\nQuestion: Q\nAnswer: c",
    variables={"answer": " c"},
    arguments={"question": "Q", "contexts": ("a", "b")},
    programs=1,
)
