"""Streams of server-sent events (HTML Living Standard, 9.2)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sglang_lite.protocol import SglError
from sglang_lite.protocol.anything import Json
from sglang_lite.server.errors import Protocol, encode_error_content
from sglang_lite.wire.json_lines import one_line

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def encode_event(content: object, name: str | None = None) -> bytes:
    """Encodes a server-sent event.

    Args:
        content: plain data or records, sent as one line of JSON.
        name: type of the event, in protocols with typed events.
    """
    data = one_line(_encode(content))
    return (
        b"data: %b\n\n" % data
        if name is None
        else b"event: %b\ndata: %b\n\n" % (name.encode(), data)
    )


class EventStream(Response):
    """Streamed response of server-sent events.

    Args:
        events: generator of the events to send. It is closed at the end, or when the reader
            disconnects. If it raises an SglError, the error is sent as the last event.
        write: function that converts the events to the body's bytes. The next part is requested
            once the previous one is sent, so that a slow reader receives fewer, larger parts.
        protocol: protocol that determines the form of an error.
        headers: headers to add to those of every stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[Any, None],  # of the type that `write` takes
        write: Callable[[AsyncGenerator[Any, None]], AsyncGenerator[bytes, None]],
        protocol: Protocol,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(
            headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})}
        )
        del self.headers["content-length"]
        self._events = events
        self._write = write
        self._protocol = protocol

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_or_raise(message: Message) -> None:
            try:
                await send(message)
            except OSError as error:
                raise ClientDisconnect from error

        async def send_part(part: bytes, *, more: bool = True) -> None:
            await send_or_raise({"type": "http.response.body", "body": part, "more_body": more})

        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        # Closing the parts before their first step would not close the events.
        with contextlib.suppress(ClientDisconnect):
            async with (
                contextlib.aclosing(self._events),
                contextlib.aclosing(self._write(self._events)) as parts,
            ):
                await send_or_raise(start)
                try:
                    async for part in parts:
                        await send_part(part)
                except SglError as error:
                    await send_part(self.encode_error(encode_error_content(error, self._protocol)))
            await send_part(b"", more=False)

    def encode_error(self, content: Mapping[str, Json]) -> bytes:
        """Encodes the error that ends a stream. `content` is the error in the protocol's form."""
        return (
            encode_event(content, content["type"])
            if self._protocol == "anthropic"
            else encode_event(content) + DONE
        )
