"""Gate that lets a fork's branches wait for the first token of one of them: by then its prompt is in the provider's
cache."""

from __future__ import annotations

import asyncio

LEAST_BRANCHES = 4


class FirstTokenGate:
    """Gate before the first generations of a fork's branches. The first branch passes at once, and opens the gate for
    the other branches."""

    __slots__ = ("_has_leader", "_opened")

    def __init__(self) -> None:
        self._has_leader = False
        self._opened = asyncio.Event()

    async def enter(self) -> bool:
        """Waits until the gate is open. Returns True at once for the first caller, which must open it. Runs on the
        executor loop."""
        if not self._has_leader:
            self._has_leader = True
            return True
        await self._opened.wait()
        return False

    def open(self) -> None:
        """Lets the waiting branches through: the first token has come, or none will come."""
        self._opened.set()
