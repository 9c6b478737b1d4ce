"""Streams of server-sent events (HTML Living Standard, 9.2)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping

import msgspec
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from sglang_lite.wire.json_lines import one_line

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(content: object, name: str | None = None) -> bytes:
    """Server-sent event, as bytes.

    Args:
        content: plain data or records, sent as one line of JSON.
        name: type of the event, in protocols with typed events.
    """
    data = one_line(_encode(content))
    return b"data: %b\n\n" % data if name is None else b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class EventStream(Response):
    """Streamed response of server-sent events.

    Args:
        parts: generator of the body's bytes. The next part is requested once the previous one is sent, so that a slow
            reader receives fewer, larger parts. Closed when the reader disconnects.
        source: generator that `parts` reads, closed, too: closing `parts` before its first step would not close it.
        headers: headers to add to those of every stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        parts: AsyncGenerator[bytes, None],
        source: AsyncGenerator[object, None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]
        self._parts, self._source = parts, source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_or_raise(message: Message) -> None:
            try:
                await send(message)
            except OSError as error:
                raise ClientDisconnect from error

        with contextlib.suppress(ClientDisconnect):
            async with contextlib.aclosing(self._source or self._parts), contextlib.aclosing(self._parts) as parts:
                await send_or_raise(
                    {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                )
                async for part in parts:
                    await send_or_raise({"type": "http.response.body", "body": part, "more_body": True})
            await send_or_raise({"type": "http.response.body", "body": b"", "more_body": False})
