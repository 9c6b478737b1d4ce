"""Branches that threads of the body's continue."""

import contextvars
import threading

import sglang_lite as sgl
from tests.conformance.case import Case


def go(branch, i):
    branch += f"{i}: " + sgl.gen("x", regex="[a-c]")
    branch += f" so {branch['x']} " + sgl.gen("y", max_tokens=2)


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(4)
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(go, branch, i))
        for i, branch in enumerate(branches)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    branches.join("concate_and_append")


CASE = Case(
    program,
    {"0: ": "a", "1: ": "b", "2: ": "c", "3: ": "a", "so a ": "p", "so b ": "q", "so c ": "r"},
    text="Start. 0: a so a p1: b so b q2: c so c r3: a so a p",
    variables={"x": ["a", "b", "c", "a"], "y": ["p", "q", "r", "p"]},
    programs=1,
)
