"""Scores against what the choices have without the prompt."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += (
        "A "
        + sgl.select("a", ["ab", "cd"], choices_method=sgl.unconditional_likelihood_normalized)
        + "!"
    )


CASE = Case(program, {"A ": "cd"}, text="A cd!", variables={"a": "cd"}, programs=1)
