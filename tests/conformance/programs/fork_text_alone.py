"""Branches without a generation."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."
    branches = s.fork(3)
    branches += lambda i: f" {i}"
    branches.join("concate_and_append")


CASE = Case(program, text="Start. 0 1 2", programs=0)
