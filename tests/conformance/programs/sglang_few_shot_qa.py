"""SGLang's few_shot_qa."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def few_shot_qa(s, question):
    s += "Q: Who?\nA: Me\n\nQ: Where?\nA: Here\n\n"
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n", temperature=0)


CASE = Case(
    few_shot_qa,
    {"When?\nA:": " Now\n\nQ:"},
    text="Q: Who?\nA: Me\n\nQ: Where?\nA: Here\n\nQ: When?\nA: Now",
    variables={"answer": " Now"},
    arguments={"question": "When?"},
    programs=1,
)
