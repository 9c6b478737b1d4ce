"""Exception that ends a body at calls that wait for a decision."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_lite.protocol.run_log import PendingCall


class Suspension(BaseException):
    """Raised to end a body at calls that wait for a decision. It is a BaseException, so that
    programs don't catch it as an error.

    Args:
        calls: calls that wait.
    """

    def __init__(self, calls: Sequence[PendingCall]) -> None:
        super().__init__(f"{len(calls)} calls wait for a decision")
        self.calls = tuple(calls)
