"""Items that a provider expects back with a turn of its model: encrypted reasoning, signed thoughts, ids of tool calls.
They are stored by the conversation up to and including that turn, so that forks, rollbacks and threads need no care. A
turn without stored items is sent as text.

Used only on the event loop that makes the calls, so that no lock is needed, which a forked process could inherit
locked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sglang_lite.protocol import Message
from sglang_lite.protocol.anything import Json

_MAX_TURNS = 4096  # stored turns


class ProviderItems:
    """Provider items of the latest turns of one backend's models."""

    def __init__(self) -> None:
        self._items: OrderedDict[tuple[Message, ...], Sequence[Any]] = OrderedDict()

    def keep(self, before: Sequence[Message], text: str, items: Sequence[Json]) -> None:
        """Stores the items of an answer that is a whole turn."""
        turn = Message("assistant", (text.lstrip(),))
        self._items[(*before, turn)] = items
        if len(self._items) > _MAX_TURNS:
            self._items.popitem(last=False)

    def of(self, messages: Sequence[Message]) -> Mapping[int, Sequence[Json]]:
        """Stored items of a conversation's turns, by index of the message."""
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
    """Yields each turn, the items that are sent in its place (or None), and the tool calls of the turn before if this
    turn has their results.

    Args:
        items: stored items, by index of the message.
        calls_of: function that extracts the tool calls from the items of a turn.
    """
    calls: list[Json] = []
    for index, message in enumerate(messages):
        stored = items.get(index)
        yield message, stored, calls if message.role == "user" else []
        calls = [] if stored is None else calls_of(stored)
