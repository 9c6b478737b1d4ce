"""SGLang's string in quotes."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Name: " + sgl.gen_string("x") + ";"


CASE = Case(program, {"Name: ": '"Ann"'}, text='Name: "Ann";', variables={"x": '"Ann"'}, programs=1)
