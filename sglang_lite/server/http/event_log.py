"""Log of a stream's events, so that a reader whose connection broke can read the rest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence


class EventLog:
    """Events, numbered from 0. Used on one event loop only.

    Attributes:
        ended: True if no more events follow.
        size: size of the events in bytes.
    """

    def __init__(self) -> None:
        self._events: list[bytes] = []
        self._more = asyncio.Event()  # set and replaced at each change
        self.ended = False
        self.size = 0

    def __len__(self) -> int:
        return len(self._events)

    def append_events(self, events: Sequence[bytes]) -> None:
        """Appends events, and wakes the readers."""
        self._events += events
        self.size += sum(map(len, events))
        self._wake()

    def mark_complete(self) -> None:
        """Marks the log as complete, which ends the streams of its readers."""
        self.ended = True
        self._wake()

    async def read_after(self, number: int) -> AsyncGenerator[bytes, None]:
        """Yields the events after a number (-1 for all), and waits for more until the log is
        complete. Available events are joined.
        """
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
