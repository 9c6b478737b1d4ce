"""A branch that fails and that nobody reads or joins."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start. "
    bad, good = s.fork(2)
    bad += (
        "bad "
        + sgl.gen("x", regex="[a-z]", check=lambda text: False)
        + " more "
        + sgl.gen("y", max_tokens=2)
    )
    good += "good " + sgl.gen("z", max_tokens=2)
    s += good["z"] + " End " + sgl.gen("w", max_tokens=2)


CASE = Case(
    program,
    {"bad ": "b", "good ": "1", "End ": "2"},
    text="Start. 1 End 2",
    variables={"w": "2"},
    programs=1,
)
