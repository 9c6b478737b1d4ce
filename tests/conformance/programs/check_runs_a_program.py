"""A check that asks the model itself."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def judge(s, text):
    s += f"Good {text}? " + sgl.select("good", ["yes", "no"])


@sgl.function
def program(s):
    s += "A: " + sgl.gen(
        "x", max_tokens=2, check=lambda text: judge.run(text)["good"] in ("yes", "no")
    )
    s += "." + sgl.gen("y", max_tokens=2)


CASE = Case(
    program,
    {"A: ": "1", "Good 1? ": "no", ".": "2"},
    text="A: 1.2",
    variables={"x": "1", "y": "2"},
    programs=2,
)
