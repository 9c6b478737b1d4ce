"""HTTP/1.1 protocol of uvicorn, corrected for clients that disconnect with several pipelined requests (RFC 9112,
9.3.2)."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle


class PipelinedConnection(HttpToolsProtocol):
    """Connection that notifies all of its open requests when its client disconnects. uvicorn notifies only the last
    one, and the one being answered would run to its end."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # uvicorn's own arguments
        super().__init__(*arguments, **options)
        self._requests: list[RequestResponseCycle] = []

    def on_headers_complete(self) -> None:
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._requests = [each for each in self._requests if not each.response_complete]
            self._requests.append(self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for each in self._requests:
            each.disconnected = each.disconnected or not each.response_complete
            each.message_event.set()
