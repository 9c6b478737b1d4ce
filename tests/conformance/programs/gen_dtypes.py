"""SGLang's dtypes, as types and by name."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += (
        "1 "
        + sgl.gen("a", dtype=int)
        + ",2 "
        + sgl.gen("b", dtype=float)
        + ",3 "
        + sgl.gen("c", dtype="str")
    )
    s += ",4 " + sgl.gen("d", dtype="int") + ",5 " + sgl.gen("e", dtype="bool") + "."


CASE = Case(
    program,
    {"1 ": "7", "2 ": "2.5", "3 ": '"x"', "4 ": "8", "5 ": "False"},
    text='1 7,2 2.5,3 "x",4 8,5 False.',
    variables={"a": "7", "b": "2.5", "c": '"x"', "d": "8", "e": "False"},
    programs=1,
)
