"""How a body ends at calls that wait for a decision."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_lite.protocol.run_log import PendingCall


class Suspension(BaseException):
    """Ends a body at calls that wait for a decision. It is no error, so that programs do not catch
    it.

    Args:
        calls: the calls.
    """

    def __init__(self, calls: Sequence[PendingCall]) -> None:
        super().__init__(f"{len(calls)} calls wait for a decision")
        self.calls = tuple(calls)
