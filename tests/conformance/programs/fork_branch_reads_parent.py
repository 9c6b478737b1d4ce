"""Branches read what the parent had made."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Name " + sgl.gen("name", regex="[a-c]{2}") + ". "
    branches = s.fork(2)
    for branch in branches:
        branch += f"{branch['name']}: " + sgl.gen("x", max_tokens=2)
    branches.join()


CASE = Case(
    program,
    {"Name ": "ab", "ab: ": "1"},
    text="Name ab. ",
    variables={"name": "ab", "x": ["1", "1"]},
    programs=1,
)
