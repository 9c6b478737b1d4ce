"""A fork's branches that wait for the first token of one of them: by then its prompt is in the provider's cache."""

from __future__ import annotations

import asyncio

LEAST_BRANCHES = 4


class FirstToken:
    """Gate before the first generations of a fork's branches. Whoever comes first goes through and opens it."""

    __slots__ = ("_led", "_opened")

    def __init__(self) -> None:
        self._led = False
        self._opened = asyncio.Event()

    async def enter(self) -> bool:
        """Waits until the gate is open. True: the caller is the first, and has to open it. On the executor loop."""
        if not self._led:
            self._led = True
            return True
        await self._opened.wait()
        return False

    def open(self) -> None:
        """Lets the others through: the first token has come, or there will be none."""
        self._opened.set()
