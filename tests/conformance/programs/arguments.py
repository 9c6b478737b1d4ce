"""Arguments, defaults and bound ones."""

import sglang_lite as sgl
from tests.conformance.case import Case


@sgl.function
def ask(s, what, mark="?", *, end):
    s += what + mark + sgl.gen("x", max_tokens=3) + end


CASE = Case(
    ask.bind(end="."),  # type: ignore[call-arg]  # some of them, which type checkers refuse
    {"Who?": " me"},
    text="Who? me.",
    variables={"x": " me"},
    arguments={"what": "Who"},
    programs=1,
)
