"""Two threads that add to one branch while it plays: nothing is lost."""

import contextvars
import threading

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def program(s):
    s += "Start."

    def add(s):
        for _ in range(40):
            s += "m"

    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(add, s)) for _ in range(2)
    ]
    s += sgl.gen("x", max_tokens=2)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    s += "End" + sgl.gen("y", max_tokens=2)


CASE = Case(
    program,
    {"Start.": "1", "End": "2"},
    text="Start.1" + "m" * 80 + "End2",
    variables={"x": "1", "y": "2"},
    programs=1,
)
