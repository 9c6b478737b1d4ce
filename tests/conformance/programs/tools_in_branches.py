"""Tools in branches; what they gave goes into the text."""

import sglang_lite as sgl
from tests.conformance.case import Case


def double(a: int) -> int:
    """Twice as much."""
    return 2 * a


@sgl.function
def program(s):
    s += "Start. "
    branches = s.fork(2)
    branches += lambda i: (
        f"{i}: " + sgl.gen("call", tools=[double], tool_choice="double", max_tokens=120)
    )
    for branch in branches:
        branch += f" = {branch['call'].run()} " + sgl.gen("x", max_tokens=2)
    branches.join("concate_and_append")


CASE = Case(
    program,
    {
        "0: ": '{"tool": "double", "arguments": {"a": 2}}',
        "1: ": '{"tool": "double", "arguments": {"a": 3}}',
        "= 4 ": "p",
        "= 6 ": "q",
    },
    text='Start. 0: {"tool": "double", "arguments": {"a": 2}} = 4 p1: {"tool": "double", "arguments": {"a": 3}} = 6 q',
    variables={"x": ["p", "q"]},
    blocking=False,
    engine=False,
    programs=1,
)
