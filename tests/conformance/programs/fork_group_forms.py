"""All that can be added to a group."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    branches = s.fork(2)
    branches += " text"
    branches += " x=" + sgl.gen("x", max_tokens=2)
    branches += sgl.select("y", [" yes", " no"])
    branches += (" l", " r")
    branches += [sgl.gen("z", max_tokens=2), sgl.gen("w", max_tokens=2)]
    branches += lambda i: f" {i}." if i else "." + sgl.gen("v", max_tokens=2)
    branches[0] += " 0"
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"x=": "1", "1": " no", " l": "2", " r": "3", "2.": "4"},
    text="Start. text x=1 no l2.4 0 text x=1 no r3 1.",
    variables={
        "x": ["1", "1"],
        "y": [" no", " no"],
        "z": ["2", None],
        "w": [None, "3"],
        "v": ["4", None],
    },
    programs=1,
)
