"""The text of a failed branch is appended: who reads the text is told."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(2)
    branches[0] += "good " + sgl.gen("x", max_tokens=2)
    branches[1] += "bad " + sgl.gen("y", regex="[a-z]", check=lambda text: False)
    s += "Before " + sgl.gen("z", max_tokens=2)
    branches.join("concate_and_append")
    s += "After " + sgl.gen("w", max_tokens=2)


CASE = Case(
    program,
    {"good ": "1", "bad ": "b", "Before ": "2", "After ": "3"},
    text=sgl.ValueValidationError,
    variables={
        "z": "2",
        "x": ["1", None],
        "y": sgl.ValueValidationError,
        "w": sgl.ValueValidationError,
    },
    programs=1,
)
