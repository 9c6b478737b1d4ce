"""SGLang's true_or_false."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def true_or_false(s, statement):
    s += "Determine whether the statement below is True, False, or Unknown.\n"
    s += (
        "Statement: The capital of France is Pairs.\nAnswer: True\nStatement: "
        + statement
        + "\nAnswer:"
    )
    s += sgl.select("answer", ["True", "False", "Unknown"])


CASE = Case(
    true_or_false,
    {"Rome.\nAnswer:": "False"},
    text="Determine whether the statement below is True, False, or Unknown.\n"
    "Statement: The capital of France is Pairs.\nAnswer: True\nStatement: Rome.\nAnswer:False",
    variables={"answer": "False"},
    arguments={"statement": "Rome."},
    programs=1,
)
