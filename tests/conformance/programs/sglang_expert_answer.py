"""SGLang's expert_answer: a generation names who answers."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def expert_answer(s, question):
    s += "Question: " + question + "\n"
    s += "A good person to answer is" + sgl.gen("expert", stop=[".", "\n"]) + ".\n"
    s += "For instance," + sgl.gen("answer", stop="\n")


CASE = Case(
    expert_answer,
    {"answer is": " Ann. She", "instance,": " yes\n"},
    text="Question: Why\nA good person to answer is Ann.\nFor instance, yes",
    variables={"expert": " Ann", "answer": " yes"},
    arguments={"question": "Why"},
    programs=1,
)
