"""Every kind of operation that a player performs at once changes what some conformance program
gives.
"""

import pytest

import sglang_lite as sgl
from sglang_lite.lang.execution.player import IMMEDIATE
from tests.conformance.case import cases, expected, outcome

CASES = cases()
# Kinds that can't be left out, by the names of their classes, with the reason.
NOT_LEFT_OUT = {
    **dict.fromkeys(
        ("GenOp", "SelectOp", "ForkOp", "ScopeOp", "ReadOp"), "what reads its value waits for ever."
    ),
    "ReplaceOp": "streams and hooks see another text, so tests/lang/test_random_compactions.py has its programs.",
    "EventOp": "it calls the caller's functions, which conformance programs do not have.",
}
KINDS = [kind for kind in IMMEDIATE if kind.__name__ not in NOT_LEFT_OUT]


def test_what_is_not_left_out_is_a_kind():
    assert NOT_LEFT_OUT.keys() <= {kind.__name__ for kind in IMMEDIATE}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_kind_that_does_nothing_changes_a_program(kind, monkeypatch):
    monkeypatch.setitem(IMMEDIATE, kind, lambda player, operation: True)
    scripted = ((case, sgl.ScriptedBackend(case.answers)) for case in CASES.values())
    assert any(outcome(case, backend) != expected(case) for case, backend in scripted), (
        f"{kind.__name__} has no effect in any program of tests/conformance/programs: add one."
    )
