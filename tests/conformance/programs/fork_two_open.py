"""Two forks, joined in the other order."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    first, second = s.fork(2), s.fork(2)
    first += " f" + sgl.gen("x", max_tokens=2)
    second += " s" + sgl.gen("y", max_tokens=2)
    second.join("concate_and_append")
    first.join("concate_and_append")


CASE = Case(
    program,
    {" f": "1", " s": "2"},
    text="Start. s2 s2 f1 f1",
    variables={"x": ["1", "1"], "y": ["2", "2"]},
    programs=1,
)
