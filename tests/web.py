"""A web of named hosts, all of which are one server of this machine."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

Page = Callable[[BaseHTTPRequestHandler], None]


def sends(content: bytes, status: int = 200, **headers: str) -> Page:
    """Page of some content."""

    def page(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"content_length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return page


@contextmanager
def web(
    hosts: Mapping[str, str], pages: Mapping[str, Page], tls: ssl.SSLContext | None = None
) -> Iterator[list[str]]:
    """Lets names be looked up as addresses, all of which lead to a server with these pages, over
    TLS if it has a context. Yields the paths that were asked for.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            pages.get(self.path, sends(b"", 404))(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # the other side has cut the connection

    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    look_up, connect = socket.getaddrinfo, socket.create_connection

    def looked_up(host: Any, port: Any, *args: Any, **more: Any) -> Any:
        if host not in hosts:
            return look_up(host, port, *args, **more)
        kind = socket.AF_INET6 if ":" in hosts[host] else socket.AF_INET
        return [(kind, socket.SOCK_STREAM, 6, "", (hosts[host], port))]

    def connected(address: tuple[str, int], *args: Any, **more: Any) -> socket.socket:
        return connect(
            ("127.0.0.1", server.server_port) if address[0] in hosts.values() else address,
            *args,
            **more,
        )

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", looked_up)
            patch.setattr(socket, "create_connection", connected)
            yield asked
    finally:
        server.shutdown()
        server.server_close()
