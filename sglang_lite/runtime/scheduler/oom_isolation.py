"""Isolates requests after an out-of-memory error: each runs alone, to find those that don't fit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.requests.request import Request


class Isolation:
    """Queue of requests, each of which runs alone until it has one more token or has ended.

    Attributes:
        suspects: the requests, each with its number of tokens when it was queued.
    """

    def __init__(self) -> None:
        self.suspects: deque[tuple[Request, int]] = deque()

    @property
    def next(self) -> Request | None:
        """The only request that may run, or None without isolation."""
        return self.suspects[0][0] if self.suspects else None

    def isolate_requests(self, requests: Iterable[Request]) -> None:
        """Starts isolating requests that have just been retracted; replaces the queue."""
        self.suspects = deque((request, len(request.tokens)) for request in requests)

    def drop_cleared_suspect(self, table: SlotTable) -> bool:
        """Removes the first request if it has one more token or has ended. Returns whether it did."""
        if not self.suspects:
            return False
        request, known = self.suspects[0]
        now = len(request.tokens) if request.handle is None else int(table.known[request.slot])
        if not request.ended and now <= known:
            return False
        self.suspects.popleft()
        return True
