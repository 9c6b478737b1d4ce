"""uvicorn's HTTP/1.1 protocol, with limits that apply before a handler runs. They bound the data
that a client can make the server store, and the time that it can make the server wait.

uvicorn's own settings set no such limits: `limit_concurrency` counts only requests whose headers
are complete, `timeout_keep_alive` runs only after an answer, and httptools doesn't limit the size
of a head.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from http import HTTPStatus
from typing import Any, Final, cast

import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sglang_lite.protocol import OverloadedError, ParameterError, SglError, WireError
from sglang_lite.server.errors import (
    LargeHeadersError,
    LongUrlError,
    RateLimitError,
    SlowRequestError,
    TooLargeError,
    encode_error_content,
    error_headers,
    find_error_status,
)
from sglang_lite.server.http.sockets import set_unread_timeout
from sglang_lite.server.lingering import Linger, LingeringTransport
from sglang_lite.server.settings import ServerSettings
from sglang_lite.server.unread_client import UnreadClient

_MAX_QUEUED: Final = 16  # waiting requests on a connection, after which it is not read any further
# bytes that are parsed between two checks of the queue; they hold at most 160 requests
_PIECE: Final = 4096
# chunks of a body; more must average `_MIN_PART` bytes, since each takes the same time
_MAX_PARTS: Final = 1000
_MIN_PART: Final = 64


class _Reading(FlowControl):
    """uvicorn's flow control, with an additional way to pause reading. Used while received data
    must not be parsed yet.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self._transport = transport
        self._is_held = False

    def hold(self) -> None:
        """Pauses reading until `release_hold`, even if something else resumes it."""
        self._is_held = True
        self._transport.pause_reading()

    def release_hold(self) -> None:
        """Resumes reading, unless uvicorn has paused it."""
        self._is_held = False
        if not self.read_paused:
            self._transport.resume_reading()

    def resume_reading(self) -> None:
        if self._is_held:
            self.read_paused = False
        else:
            super().resume_reading()


class ClientConnection(HttpToolsProtocol):
    """Connection of a client, closed if the client exceeds a limit.

    A client may send any number of requests ahead of their answers: while too many wait for their
    turn, nothing more is read. A client that closes its sending side still gets the answers to
    what it has sent.

    When the client disconnects, all of the connection's open requests are notified (RFC 9112,
    9.3.2). uvicorn notifies only the last request, so the request being answered would run to its
    end.

    Args:
        settings: settings of the server, with the limits.
        clients: number of connections of each client's address, shared by all connections of a
            server.
        linger: closed connections whose clients are still sending, also shared by all connections.
        arguments, options: uvicorn's own.
    """

    def __init__(
        self,
        *arguments: Any,  # uvicorn's own
        settings: ServerSettings,
        clients: Counter[str],
        linger: Linger,
        **options: Any,  # uvicorn's own
    ) -> None:
        super().__init__(*arguments, **options)
        self._settings = settings
        self._clients = clients
        self._linger = linger
        self._most = int(settings.max_head_kb * 1024)
        self._address = ""
        self._requests: list[RequestResponseCycle] = []
        # bytes and lines of the head of the request that is being read
        self._head = self._lines = 0
        # parts of that request's body that the parser has returned so far, and their bytes
        self._parts = self._size = 0
        self._unparsed = 0  # bytes that the parser still buffers
        # whether the request that is being read has begun, and has reached its body
        self._begun = self._in_body = False
        self._hosts = 0  # `Host` lines in that head
        self._refused: SglError | None = None  # why the parser was stopped
        self._drops_rest = False  # whether to drop further data, because a request was refused
        self._last_answer: SglError | None = None  # sent once all earlier requests are answered
        self._held = memoryview(b"")  # data that is parsed when there is room for requests
        self._ended = False  # the client has closed its sending side
        self._timer: asyncio.TimerHandle | None = None

    # ------------------------------------------------------------------------------- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's own
        set_unread_timeout(transport.get_extra_info("socket"), self._settings.unread_timeout_s)
        transport = cast(
            "asyncio.Transport",
            LingeringTransport(transport, self._linger, self._is_client_sending),
        )
        super().connection_made(transport)
        self.flow = self._reading = _Reading(transport)
        self._unread = UnreadClient(transport, self.flow, self._client_awaits_response)
        self._address = self.client[0] if self.client else ""
        self._clients[self._address] += 1
        settings = self._settings
        if len(self.connections) > settings.max_connections:
            told = f"{settings.max_connections:,} connections are open, which is the limit."
            self._refuse_request(OverloadedError(told, hint="Try again later."))
        elif self._clients[self._address] > settings.max_connections_per_client:
            told = f"{settings.max_connections_per_client:,} connections of this client are open, which is the limit."
            self._refuse_request(
                RateLimitError(told, hint="Use connections again, or try again later.")
            )
        else:
            self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._unread.stop()
        self._held = memoryview(b"")
        self._clients[self._address] -= 1
        if not self._clients[self._address]:
            del self._clients[self._address]
        super().connection_lost(exc)
        for each in self._requests:
            each.disconnected = each.disconnected or not each.response_complete
            each.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._last_answer is not None:
            return
        self._held = memoryview(bytes(self._held) + data if self._held else data)
        self._parse_held()

    def _parse_held(self) -> None:
        """Parses held data piece by piece while there is room for requests, and resumes reading
        once all of it is parsed.
        """
        while self._held and len(self.pipeline) < _MAX_QUEUED:
            piece = self._held[:_PIECE]
            self._held = self._held[_PIECE:]
            self._unparsed += len(piece)
            super().data_received(piece)  # type: ignore[arg-type] # the parser takes any buffer
            if self._unparsed > self._most:
                self._refuse_request(self._large_headers_error())
            if self.transport.is_closing() or self._last_answer is not None:
                self._held = memoryview(b"")
                return
        if self._held:
            self._reading.hold()
            self._unread.watch()
            return
        self._unread.stop()
        self._reading.release_hold()
        if self._timer is None and (self._in_body or not self._answering):
            self._set_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._held:
            self._parse_held()
        elif self._ended or self._last_answer is not None:
            self._finish_connection()
        # part of the next head has arrived
        elif self._timer is None and self._begun and not self._answering:
            self._set_timer()

    def eof_received(self) -> bool | None:  # type: ignore[override] # uvicorn's own always closes
        """Handles the end of the client's input. Keeps the connection open if answers are due. Lets
        asyncio close the connection if it uses TLS, or if the next answer has begun and the client
        is not slow to read it.
        """
        if self._begun and self._last_answer is None:
            self._refuse_request(
                WireError("the client has ended the connection in the middle of a request.")
            )
        # TLS can't end one side only
        has_half_ends = UnreadClient.is_supported() and self.scheme == "http"
        due = self._unfinished_requests()
        if self.transport.is_closing() or not due or not has_half_ends:
            return None
        if due[0].response_started and not self.flow.write_paused:
            # a running stream may be silent for long, and nothing would show that the client has
            # left
            return None
        self._ended = True
        self._cancel_timer()
        self._finish_connection()
        return True

    def _finish_connection(self) -> None:
        """Sends the pending error, if there is one, and closes the connection. While requests are
        unanswered, only watches whether the client leaves.
        """
        if self._unfinished_requests():
            self._unread.watch()
        elif self._last_answer is not None:
            self._refuse_request(self._last_answer)
        else:
            self.transport.close()

    def _is_client_sending(self) -> bool:
        return self._drops_rest or self._begun or self._in_body or bool(self._held)

    def _client_awaits_response(self) -> bool:
        current = next(iter(self._unfinished_requests()), None)
        return (
            current is not None
            and current.scope["http_version"] == "1.1"
            and not current.response_started
        )

    def _unfinished_requests(self) -> list[RequestResponseCycle]:
        """Returns the requests whose answers are incomplete, in order."""
        return [each for each in self._requests if not each.response_complete]

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    # ----------------------------------------------------------------------- the parser's callbacks

    def on_message_begin(self) -> None:
        self._head = self._lines = self._parts = self._size = self._hosts = 0
        self._begun = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head_bytes(len(url))
        if self._head > self._most:
            told = f"the address is longer than {self._most:,} bytes."
            raise self._stop_parser(
                LongUrlError(told, hint="Send the text in a body, or raise max_head_kb.")
            )
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Reads a header, or a trailer (a header after the body)."""
        self._lines += 1
        self._count_head_bytes(len(name) + len(value))
        if self._head > self._most:
            raise self._stop_parser(self._large_headers_error())
        if self._lines > self._settings.max_header_lines:
            told = f"the request has more than {self._settings.max_header_lines:,} header lines."
            raise self._stop_parser(
                LargeHeadersError(told, hint="Send fewer, or raise max_header_lines.")
            )
        self._hosts += not self._in_body and name.lower() == b"host"
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        # RFC 9112, 3.2
        if self._hosts > 1 or (not self._hosts and self.parser.get_http_version() == "1.1"):
            told = f"the request has {self._hosts or 'no'} header lines `Host`."
            raise self._stop_parser(
                ParameterError("Host", told, hint="Send one, with the name of the server.")
            )
        self._cancel_timer()
        self._unparsed = 0
        self._in_body = True
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self._requests = [each for each in self._requests if not each.response_complete]
            self._requests.append(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._parts += 1
        self._size += len(body)
        if self._parts > _MAX_PARTS + self._size // _MIN_PART:
            told = f"the body has more than {_MAX_PARTS:,} chunks of less than {_MIN_PART} bytes."
            raise self._stop_parser(TooLargeError(told, hint="Send it in larger chunks."))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._cancel_timer()
        self._unparsed = 0
        self._begun = self._in_body = False
        super().on_message_complete()

    def _count_head_bytes(self, count: int) -> None:
        self._head += count
        self._unparsed = 0

    def _large_headers_error(self) -> SglError:
        told = f"the headers are larger than {self._most:,} bytes."
        return LargeHeadersError(told, hint="Send less, or raise max_head_kb.")

    def _stop_parser(self, error: SglError) -> SglError:
        """Stores an error and returns it. The parser's callback raises it to stop the parser, and
        uvicorn then calls `send_400_response`.
        """
        self._refused = error
        return error

    # -------------------------------------------------------------------------------------- the end

    def _set_timer(self) -> None:
        """Starts the time limit for receiving the body, or the request's head if no body is being
        read.
        """
        seconds = self._settings.body_timeout_s if self._in_body else self._settings.head_timeout_s
        self._timer = self.loop.call_later(seconds, self._on_request_timeout)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_request_timeout(self) -> None:
        self._timer = None
        if self._answering:  # the handler has the same limit for the body
            return
        if self._begun and not self._in_body:
            told = f"the headers did not arrive within {self._settings.head_timeout_s:g} seconds."
            self._refuse_request(SlowRequestError(told, hint="End them with an empty line."))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Rejects the data at which the parser stopped."""
        self._refuse_request(self._refused or WireError(msg))

    def _refuse_request(self, error: SglError) -> None:
        """Answers the request that is being read with an error, and closes the connection. Earlier
        requests are answered first. If this request's answer has already begun, only closes the
        connection, because the client would take the error for a part of the answer.
        """
        present = self.cycle if self._in_body else None
        if any(each is not present for each in self._unfinished_requests()):
            self._last_answer = error
            self._in_body = False
            # it never begins
            if present is not None and self.pipeline and self.pipeline[0][0] is present:
                self.pipeline.popleft()
                self._requests.remove(present)
            self._reading.hold()
            self._unread.watch()
            return
        if not ((present and present.response_started) or self.transport.is_closing()):
            status = find_error_status(error).status
            body = msgspec.json.encode(encode_error_content(error, "native"))
            lines = [
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
                "content-type: application/json",
            ]
            lines += [
                f"{name}: {value}"
                for name, value in error_headers(error).items()
                if name != "connection"
            ]
            lines += [f"content-length: {len(body)}", "connection: close", "", ""]
            self.transport.write("\r\n".join(lines).encode() + body)
        self._drops_rest = True
        self.transport.close()
