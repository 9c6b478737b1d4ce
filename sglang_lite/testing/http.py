"""Local HTTP server whose answers come from a function. Independent of providers."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol, Self

from sglang_lite.protocol.anything import Json
from sglang_lite.wire.json_lines import one_line


@dataclass(frozen=True, slots=True)
class Request:
    """Request of a client. `path` includes the query. Names of `headers` are in lower case."""

    path: str
    headers: Mapping[str, str]
    body: Any
    method: str = "POST"


class HttpAnswer(Protocol):
    """Interface of answers that the server can send."""

    def send(self, handler: Handler) -> None: ...


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer in one piece: an object of an SDK, JSON data, or text, which is sent unchanged.

    Attributes:
        body: content of the answer.
        cut: True to close the connection in the middle of the body.
        pause: seconds before the answer.
    """

    body: Any = ""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    pause: float = 0.0

    def send(self, handler: Handler) -> None:
        time.sleep(self.pause)
        data = encode_body(self.body)
        handler.send_response(self.status)
        for name, value in {"Content-Type": "application/json", **self.headers}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[: len(data) // 2] if self.cut else data)
        handler.close_connection = handler.close_connection or self.cut


@dataclass(frozen=True, slots=True)
class Events:
    """Stream of server-sent events.

    Attributes:
        events: objects of an SDK, JSON data, or text, which is sent unchanged.
        end: "done" ends the stream properly, "drop" closes the connection in the middle, "hold"
            waits until the client disconnects.
        headers: headers of the response.
        pause: seconds before each event.
        buffered: True to send all events together at the end, like a buffering proxy.
    """

    events: Iterable[Any]
    end: str = "done"
    headers: Mapping[str, str] = field(default_factory=dict)
    pause: float = 0.0
    buffered: bool = False

    def send(self, handler: Handler) -> None:
        handler.send_response(200)
        for name, value in {"Content-Type": "text/event-stream", **self.headers}.items():
            handler.send_header(name, value)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        buffered = b""
        for event in self.events:
            time.sleep(self.pause)
            data = encode_body(event)
            kind = None if isinstance(event, str) else json.loads(data).get("type")
            if not isinstance(event, str):
                data = one_line(data)
            data_event = (
                (b"event: %s\n" % kind.encode() if kind else b"") + b"data: " + data + b"\n\n"
            )
            if self.buffered:
                buffered += data_event
            else:
                _write_chunk(handler, data_event)
        if buffered:
            _write_chunk(handler, buffered)
        if self.end == "done":
            _write_chunk(handler, b"")
        elif self.end == "drop":
            handler.close_connection = True
        else:
            handler.server_for_tests.wait_for_disconnect(handler)


class Hold:
    """Answer that never arrives: waits until the client disconnects."""

    def send(self, handler: Handler) -> None:
        handler.server_for_tests.wait_for_disconnect(handler)


class Drop:
    """Answer that closes the connection without a response."""

    def send(self, handler: Handler) -> None:
        handler.close_connection = True


class _Listener(ThreadingHTTPServer):
    request_queue_size = 1024  # number of programs that may connect at the same time


class LocalServer:
    """Server on a free port of this machine. It runs inside its `with` block.

    Attributes:
        requests: all requests, in order.
        hung_up: event, set when a client has disconnected from an answer that never ends.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.hung_up = threading.Event()
        self.lock = threading.Lock()
        handler = type("BoundHandler", (Handler,), {"server_for_tests": self})
        self._server = _Listener(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def last(self) -> Json:
        """Body of the last request."""
        return self.requests[-1].body

    def record_and_answer(self, request: Request) -> HttpAnswer:
        """Appends a request to `requests` and returns its answer."""
        with self.lock:
            self.requests.append(request)
            return self.answer_request(request)

    def answer_request(self, request: Request) -> HttpAnswer:
        """Returns the answer to a request, 404 by default. Subclasses override this method."""
        return Reply("", 404)

    def wait_for_disconnect(self, handler: Handler) -> None:
        # a client with unread data resets the connection
        with contextlib.suppress(ConnectionResetError):
            handler.connection.recv(1)
        handler.close_connection = True
        self.hung_up.set()


class Handler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    protocol_version = "HTTP/1.1"
    server_for_tests: LocalServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            content = json.loads(body) if body else None
        except ValueError:
            content = body
        self._answer(Request(self.path, self._lower_headers(), content))

    def do_GET(self) -> None:
        self._answer(Request(self.path, self._lower_headers(), None, "GET"))

    def _lower_headers(self) -> dict[str, str]:
        return {name.lower(): value for name, value in self.headers.items()}

    def _answer(self, request: Request) -> None:
        # the client has disconnected
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.server_for_tests.record_and_answer(request).send(self)

    def log_message(self, format: str, *args: object) -> None:
        """Discards log messages."""


def encode_body(body: Json) -> bytes:
    """Encodes a body as bytes."""
    if isinstance(body, str):
        return body.encode()
    return (body.to_json(indent=None) if hasattr(body, "to_json") else json.dumps(body)).encode()


def _write_chunk(handler: Handler, data: bytes) -> None:
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
    handler.wfile.flush()
