"""A scope around a selection and a read."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    with s.var_scope("all"):
        s += "a " + sgl.select("x", ["on", "off"])
        s += f" {s['x']} " + sgl.gen("y", max_tokens=2)
    s += f" [{len(s['all']) > 0}]"


CASE = Case(
    program,
    {"a ": "off", "off ": "z"},
    text="a off off z [True]",
    variables={"all": "a off off z", "x": "off", "y": "z"},
    programs=1,
)
