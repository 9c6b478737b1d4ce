"""A local HTTP server that speaks the providers' protocols. Its answers are made of the SDKs' own types."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Request:
    """What a client sent."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Reply:
    """An answer in one piece: a model of an SDK, or anything JSON; text goes out as it is."""

    body: Any = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def send(self, handler: Handler) -> None:
        data = _encoded(self.body)
        handler.send_response(self.status)
        for name, value in {"Content-Type": "application/json", **self.headers}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)


@dataclass
class Events:
    """A stream of server-sent events.

    Attributes:
        events: models of an SDK, anything JSON, or text, which goes out as it is.
        end: "done" ends it as it should, "drop" closes the connection in the middle, "hold" waits for the client to go.
    """

    events: Iterable[Any]
    end: str = "done"
    headers: dict[str, str] = field(default_factory=dict)

    def send(self, handler: Handler) -> None:
        handler.send_response(200)
        for name, value in {"Content-Type": "text/event-stream", **self.headers}.items():
            handler.send_header(name, value)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for event in self.events:
            data = _encoded(event)
            kind = None if isinstance(event, str) else json.loads(data).get("type")
            head = b"event: %s\n" % kind.encode() if kind else b""
            self._chunk(handler, head + b"data: " + data + b"\n\n")
        if self.end == "done":
            self._chunk(handler, b"")
        elif self.end == "drop":
            handler.close_connection = True
        else:
            handler.api.wait_for_hang_up(handler)

    def _chunk(self, handler: Handler, data: bytes) -> None:
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        handler.wfile.flush()


class Hold:
    """No answer, until the client goes."""

    def send(self, handler: Handler) -> None:
        handler.api.wait_for_hang_up(handler)


class Drop:
    """The connection is closed."""

    def send(self, handler: Handler) -> None:
        handler.close_connection = True


Answer = Reply | Events | Hold | Drop


class ApiServer:
    """
    Attributes:
        answers: what to answer, in order; the last one stays. Or a function of the request.
        requests: every request, in order.
        hung_up: set when a client has gone from an answer that holds.
    """

    def __init__(self) -> None:
        self.answers: list[Answer] | Callable[[Request], Answer] = []
        self.requests: list[Request] = []
        self.hung_up = threading.Event()
        self._lock = threading.Lock()
        handler = type("BoundHandler", (Handler,), {"api": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> ApiServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def last(self) -> Any:
        """The body of the last request."""
        return self.requests[-1].body

    def take(self, request: Request) -> Answer:
        with self._lock:
            self.requests.append(request)
            if callable(self.answers):
                return self.answers(request)
            return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def wait_for_hang_up(self, handler: Handler) -> None:
        with contextlib.suppress(ConnectionResetError):  # a client that has not read everything resets
            assert handler.connection.recv(1) == b""
        handler.close_connection = True
        self.hung_up.set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    api: ApiServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.api.take(Request(self.path, dict(self.headers), json.loads(body))).send(self)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _encoded(body: Any) -> bytes:
    if isinstance(body, str):
        return body.encode()
    return (body.to_json(indent=None) if hasattr(body, "to_json") else json.dumps(body)).encode()
