"""Events of the nodes of a branch that a backend plays: what comes first waits for its reader."""

from __future__ import annotations

import asyncio
from bisect import bisect
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any, TypeAlias

from sglang_lite.lang.concurrency.variables import resolve
from sglang_lite.protocol import Delta, Generation, Selection, SglError
from sglang_lite.protocol.anything import UserValue

Attempt: TypeAlias = tuple[int, int]  # index of a node in its branch, and number of the attempt at it


class NodeEvents:
    """Queue of a node's events, with a single consumer. Used on the executor loop only.

    Attributes:
        events: events that have come and were not taken.
        then: called once when the next event comes.
    """

    __slots__ = ("events", "then")

    def __init__(self) -> None:
        self.events: deque[Any] = deque()
        self.then: Callable[[], object] | None = None

    def put(self, event: object) -> None:
        self.events.append(event)
        then, self.then = self.then, None
        if then is not None:
            then()

    async def get(self) -> UserValue:
        if not self.events:
            arrival = asyncio.get_running_loop().create_future()
            self.then = partial(resolve, arrival)
            await arrival
        return self.events.popleft()

    def cancel(self) -> None:
        """Revokes the callback."""
        self.then = None


class BranchEvents:
    """Events of a branch's nodes. Used on the executor loop, but for the attributes.

    Attributes:
        judged: indices of all nodes so far on whose answer the caller decides.
        rollbacks: indices of the rollbacks' nodes, ascending.
    """

    __slots__ = ("_ended", "_failed", "_inboxes", "judged", "rollbacks")

    def __init__(self) -> None:
        self.judged = set[int]()
        self.rollbacks: list[int] = []
        self._inboxes: dict[Attempt, NodeEvents] = {}
        self._ended: SglError | None = None  # error with which the program ended
        self._failed: tuple[int, SglError] | None = None  # index of the failed node, and its error

    def take(self, attempt: Attempt, event: Delta | Generation | Selection | SglError) -> None:
        """Passes an event of a node to its inbox. An error also fails all nodes behind it, up to a rollback, unless the
        node is judged."""
        place, _ = attempt
        if isinstance(event, SglError) and place not in self.judged:
            self._failed = place, event
            for each, inbox in list(self._inboxes.items()):
                if each[0] > place and self._is_lost(each[0]):
                    inbox.put(event)
        self._inbox(attempt).put(event)

    def _is_lost(self, place: int) -> bool:
        """Returns True if an earlier node has failed and no rollback between the two has taken it back."""
        if self._failed is None or self._failed[0] >= place:
            return False
        back = bisect(self.rollbacks, self._failed[0])
        return back == len(self.rollbacks) or self.rollbacks[back] > place

    def end(self, error: SglError) -> None:
        """Ends the branch with an error: no more events will come."""
        self._ended = error
        for inbox in list(self._inboxes.values()):
            inbox.put(error)

    async def answers(self, attempt: Attempt, last: int = 1) -> AsyncGenerator[Delta | Generation | Selection, None]:
        """Yields the events of a node, up to its `last`-th generation or selection. Raises the SglError with which the
        node failed."""
        inbox = self._inbox(attempt)
        try:
            while last:
                event = await inbox.get()
                if isinstance(event, SglError):
                    raise event
                last -= not isinstance(event, Delta)
                yield event
        finally:
            self._inboxes.pop(attempt, None)

    def answer(self, place: int, then: Callable[[], object]) -> UserValue:
        """First event of a node. If none has come yet, the node's inbox, which calls `then` when one comes."""
        inbox = self._inbox((place, 0))
        if not inbox.events:
            inbox.then = then
            return inbox
        del self._inboxes[place, 0]
        return inbox.events.popleft()

    def _inbox(self, attempt: Attempt) -> NodeEvents:
        found = self._inboxes.get(attempt)
        if found is None:
            found = self._inboxes[attempt] = NodeEvents()
            if self._failed is not None and self._is_lost(attempt[0]):
                found.put(self._failed[1])
            elif self._ended is not None:
                found.put(self._ended)
        return found
