"""Selections that are taken back until one will do."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Go"
    with s.checkpoint() as place:
        for word in ("? ", "! ", ". "):
            s += word + sgl.select("go", ["on", "off"])
            if s["go"] == "off":
                break
            place.rollback()
    s += " then " + sgl.gen("x", max_tokens=2)


CASE = Case(
    program,
    {"? ": "on", "! ": "off", "then ": "z"},
    text="Go! off then z",
    variables={"go": "off", "x": "z"},
    streams=False,
    programs=1,
)
