"""Events of a stream, kept while they come, so that a reader whose connection broke gets the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence


class EventLog:
    """Events by their numbers, from 0 on. It belongs to one event loop.

    Attributes:
        ended: nothing more comes.
        size: of the events, in bytes.
    """

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._more = asyncio.Event()  # one for each time that something comes
        self.ended = False
        self.size = 0

    def __len__(self) -> int:
        return len(self._events)

    def add(self, events: Sequence[bytes]) -> None:
        """Keeps further events."""
        self._events += events
        self.size += sum(map(len, events))
        self._wake()

    def end(self) -> None:
        """Ends the streams of those who follow."""
        self.ended = True
        self._wake()

    async def behind(self, number: int) -> AsyncGenerator[bytes, None]:
        """Events after one, -1 for all; those that are still to come, too."""
        at = number + 1
        while True:
            more = self._more
            if at < len(self._events):
                found = self._events[at:]
                at += len(found)
                yield b"".join(found)
            elif self.ended:
                return
            else:
                await more.wait()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()
