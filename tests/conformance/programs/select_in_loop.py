"""A choice that decides what follows."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    for i in range(3):
        s += f"{i}? " + sgl.select("go", ["on", "off"]) + "\n"
        if s["go"] == "off":
            break
    s += "end"


CASE = Case(
    program,
    {"0? ": "on", "1? ": "off"},
    text="0? on\n1? off\nend",
    variables={"go": "off"},
    programs=1,
)
