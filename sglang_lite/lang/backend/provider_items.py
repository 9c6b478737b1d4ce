"""Items that a provider wants to be given back with a turn of its model: encrypted reasoning, signed thoughts, ids of
calls. They belong to a conversation up to and with that turn, and are found by it, so that forks, rollbacks and threads
need no care. A turn that is not found is given back as its text.

They belong to the loop that asks: there is no lock, which a forked copy of the process could find taken."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sglang_lite.protocol import Message
from sglang_lite.protocol.anything import Json

_MOST = 4096  # turns


class ReturnedItems:
    """Items of the turns that one backend's models have said, the last ones of them."""

    def __init__(self) -> None:
        self._items: OrderedDict[tuple[Message, ...], Sequence[Any]] = OrderedDict()

    def keep(self, before: Sequence[Message], text: str, items: Sequence[Json]) -> None:
        """Keeps the items of an answer that makes a whole turn."""
        turn = Message("assistant", (text.lstrip(),))
        self._items[(*before, turn)] = items
        if len(self._items) > _MOST:
            self._items.popitem(last=False)

    def of(self, messages: Sequence[Message]) -> Mapping[int, Sequence[Json]]:
        """Items of the turns of a conversation, by their places."""
        found = {}
        for i, message in enumerate(messages if self._items else ()):
            if message.role == "assistant":
                items = self._items.get(tuple(messages[: i + 1]))
                if items is not None:
                    found[i] = items
        return found


def conversation(
    messages: Sequence[Message], items: Mapping[int, Sequence[Json]], calls_of: Callable[[Sequence[Json]], list[Json]]
) -> Iterator[tuple[Message, Sequence[Json] | None, list[Json]]]:
    """Turns, each with what is given back in its place (None: nothing is), and with the calls of the turn before whose
    results it tells.

    Args:
        items: by the places of turns.
        calls_of: calls of tools among what is given back.
    """
    calls: list[Json] = []
    for place, message in enumerate(messages):
        given = items.get(place)
        yield message, given, calls if message.role == "user" else []
        calls = [] if given is None else calls_of(given)
