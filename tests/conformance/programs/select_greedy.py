"""The choice whose first tokens are likeliest."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "A " + sgl.select("a", ["ab", "abc", "b"], choices_method=sgl.greedy_token_selection) + "!"


CASE = Case(program, {"A ": "b"}, text="A b!", variables={"a": "b"}, programs=1)
