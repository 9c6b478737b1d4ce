"""Store of responses. It keeps the most recently used ones, up to its limits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

from sglang_lite.protocol.anything import Json
from sglang_lite.server.errors import NotFoundError, TooLargeError
from sglang_lite.server.http.event_log import EventLog

PACK: Final = msgspec.msgpack.encode
UNPACK: Final = msgspec.msgpack.decode


@dataclass(slots=True)
class StoredResponse:
    """Response in the store.

    Attributes:
        content: the response as it is returned to clients.
        input: input of the response, with the conversation before it, in msgpack: megabytes of
            objects would take long to pass to another process.
        input_bytes: size of the items in bytes.
        log: events of the stream; None if the response was not streamed.
        bytes: size of everything in bytes.
    """

    content: Mapping[str, Any]
    input: bytes
    input_bytes: int
    log: EventLog | None = None
    bytes: int = 0

    @property
    def id(self) -> str:
        found: str = self.content["id"]
        return found

    @property
    def status(self) -> Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]:
        found: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"] = (
            self.content["status"]
        )
        return found

    @property
    def items(self) -> Sequence[Mapping[str, Json]]:
        """Input of the response, with the conversation before it."""
        found: list[dict[str, Json]] = UNPACK(self.input)
        return found

    @property
    def conversation_bytes(self) -> int:
        """Approximate size in bytes of the conversation, including the answer."""
        return self.input_bytes + len(msgspec.json.encode(self.content["output"]))


class ResponseStore:
    """Store of the responses of all keys, where each key can access only its own. The least
    recently used response is dropped first.

    Args:
        most: largest number of responses.
        most_bytes: largest size of all responses in bytes.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._stored: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def check_conversation_size(self, input_bytes: int) -> None:
        """Raises TooLargeError if a conversation of this size could never be stored."""
        if input_bytes > self._most_bytes:
            raise TooLargeError(
                f"the conversation has {input_bytes:,} bytes; at most {self._most_bytes:,} are stored.",
                hint="Send store: false, and the conversation with each request.",
            )

    def add_response(self, key: str, response: StoredResponse) -> None:
        """Stores a response."""
        self._stored[key, response.id] = response
        self._update_size(response)

    def add_events(self, key: str, response: StoredResponse, events: Sequence[bytes]) -> None:
        """Appends events to the log of a streamed response; they count towards the limits while the
        response is stored.
        """
        assert response.log is not None
        response.log.append_events(events)
        if self._stored.get((key, response.id)) is response:
            self._set_response_size(response, response.bytes + sum(map(len, events)))

    def update_content(
        self, key: str, response: StoredResponse, content: Mapping[str, Json]
    ) -> None:
        """Replaces the content of a response, and updates its size if it is still stored."""
        response.content = content
        if self._stored.get((key, response.id)) is response:
            self._update_size(response)

    def find_response(self, key: str, id: str) -> StoredResponse:
        """Returns the stored response with an id. Raises NotFoundError if the response was dropped,
        or isn't the key's.
        """
        found = self._stored.get((key, id))
        if found is None:
            raise NotFoundError(
                f"there is no response {id[:100]!r}.", hint="Only the latest responses are stored."
            )
        self._stored.move_to_end((key, id))
        return found

    def find_item(self, key: str, id: str) -> Mapping[str, Json]:
        """Returns an item of any stored response of a key. Raises NotFoundError if the key has no
        item with this id.
        """
        for (owner, _), response in reversed(self._stored.items()):
            if owner == key:
                # reading all items takes longer
                inside = id.encode("utf-8", "replace") in response.input
                items: Iterable[Mapping[str, Any]] = (
                    *(response.items if inside else ()),
                    *response.content["output"],
                )
                for item in items:
                    if item.get("id") == id:
                        return item
        raise NotFoundError(
            f"there is no item {id[:100]!r}.", hint="Only items of the latest responses are stored."
        )

    def remove_response(self, key: str, id: str) -> StoredResponse:
        """Removes and returns a response. Raises NotFoundError like `find_response`."""
        found = self.find_response(key, id)
        self._drop_stored_response((key, id))
        return found

    def _update_size(self, response: StoredResponse) -> None:
        size = response.input_bytes + len(msgspec.json.encode(response.content))
        size += 0 if response.log is None else response.log.size
        self._set_response_size(response, size)

    def _set_response_size(self, response: StoredResponse, size: int) -> None:
        """Sets the size of a response, and drops the least recently used ones if the store has
        become too large.
        """
        self._bytes += size - response.bytes
        response.bytes = size
        while len(self._stored) > self._most or self._bytes > self._most_bytes:
            self._drop_stored_response(next(iter(self._stored)))

    def _drop_stored_response(self, at: tuple[str, str]) -> None:
        self._bytes -= self._stored.pop(at).bytes
