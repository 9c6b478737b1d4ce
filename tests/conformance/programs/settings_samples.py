"""Several samples of each generation, as the run says."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A: " + sgl.gen("a", max_tokens=2) + "|" + sgl.gen("b", n=1, max_tokens=2)


CASE = Case(
    program,
    {"A: ": ["1", "2"], "|": "3"},
    text="A: 1|3",
    variables={"a": ["1", "2"], "b": "3"},
    settings={"n": 2},
    programs=1,
)
