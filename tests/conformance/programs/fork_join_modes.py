"""Two forks, one whose variables are gathered and one whose texts are appended."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    asides, parts = s.fork(2), s.fork(2)
    asides += lambda i: f" aside {i}=" + sgl.gen("x", max_tokens=2)
    parts += lambda i: f" part {i}=" + sgl.gen("y", max_tokens=2)
    asides.join("gather_variable")
    parts.join("concate_and_append")
    s += " End" + sgl.gen("z", max_tokens=2)


CASE = Case(
    program,
    {"aside 0=": "a", "aside 1=": "b", "part 0=": "c", "part 1=": "d", " End": "e"},
    text="Start. part 0=c part 1=d Ende",
    variables={"x": ["a", "b"], "y": ["c", "d"], "z": "e"},
    programs=1,
)
