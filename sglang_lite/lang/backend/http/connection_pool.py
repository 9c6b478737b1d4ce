"""Pool of HTTP connections in which acquiring a connection always takes the same time, even with
many connections.

The HTTP library's own pool scans all of its connections on every request, and asks the system about
each idle one: 8 ms of processor time per request at 1,000 connections. Here each connection is a
transport of that library with room for one connection, so that the library still handles HTTP, TLS
and broken connections. Idle connections form a stack.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextvars import Context
from functools import cache, partial
from urllib.request import getproxies

import httpx2

from sglang_lite.lang.backend.token_counts import SentRequests, sent_requests
from sglang_lite.protocol.anything import Foreign

_PROXIES = {"http", "https", "all"}
# Environment variables that name certificate authorities other than the system's.
_AUTHORITIES = ("SSL_CERT_FILE", "SSL_CERT_DIR")
# the SDKs' own defaults
_MAX_CONNECTIONS = 1000
_IDLE_S = 5.0
# A call may be silent for minutes; keep-alive packets stop network devices from dropping the
# connection.
_KEPT_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 60), ("TCP_KEEPCNT", 5))
    if hasattr(socket, name)
]


def pool_arguments(
    verify: ssl.SSLContext | str | bool = True,
    *,
    max_connections: int | None = _MAX_CONNECTIONS,
    trust_env: bool = True,
) -> dict[str, Foreign]:
    """Returns the arguments that make an `httpx2.AsyncClient` use this pool. Returns no arguments
    if the environment names a proxy, which this pool does not support.
    """
    proxied = trust_env and not _PROXIES.isdisjoint(getproxies())
    return {} if proxied else {"transport": ConnectionPool(verify, max_connections=max_connections)}


class ConnectionPool(httpx2.AsyncBaseTransport):
    """Transport of an `httpx2.AsyncClient`, for one event loop.

    Args:
        verify: TLS verification, like the client's argument.
        max_connections: maximum number of connections, or None for no limit; a further request
            waits for one, up to its `pool` timeout.
        idle_s: seconds after which an idle connection is closed, or None for the SDKs' default (5
            s).
    """

    def __init__(
        self,
        verify: ssl.SSLContext | str | bool = True,
        *,
        max_connections: int | None = _MAX_CONNECTIONS,
        idle_s: float | None = None,
    ) -> None:
        self._idle_s = _IDLE_S if idle_s is None else idle_s
        self._tls = (
            _default_tls_context(*map(os.environ.get, _AUTHORITIES))
            if verify is True
            else httpx2.create_ssl_context(verify)
        )
        self._limits = httpx2.Limits(
            max_connections=1, max_keepalive_connections=1, keepalive_expiry=self._idle_s
        )
        self._room = None if max_connections is None else asyncio.Semaphore(max_connections)
        self._all: set[httpx2.AsyncHTTPTransport] = set()
        # (idle since, connection), last used last
        self._idle: deque[tuple[float, httpx2.AsyncHTTPTransport]] = deque()
        self._sweeping: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if self._room is not None:
            await _wait_for_free_connection(self._room, request)
        connection = self._idle.pop()[1] if self._idle else self._create_connection()
        sent = sent_requests.get() or SentRequests()
        sent.tried += 1
        try:
            response = await connection.handle_async_request(request)
        except BaseException as error:
            sent.processed += not isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout)
            self._release_connection(connection)
            raise
        sent.processed += response.status_code < 400
        assert isinstance(response.stream, httpx2.AsyncByteStream)
        response.stream = _Body(response.stream, partial(self._release_connection, connection))
        return response

    def _create_connection(self) -> httpx2.AsyncHTTPTransport:
        made = httpx2.AsyncHTTPTransport(
            verify=self._tls, limits=self._limits, socket_options=_KEPT_ALIVE
        )
        self._all.add(made)
        return made

    def _release_connection(self, connection: httpx2.AsyncHTTPTransport) -> None:
        """Returns a free connection to the pool."""
        self._idle.append((time.monotonic(), connection))
        if self._room is not None:
            self._room.release()
        if self._sweeping is None:
            self._schedule_idle_close(self._idle_s)

    def _schedule_idle_close(self, seconds: float) -> None:
        # runs in an empty context: the run's own would keep its backend alive
        loop = asyncio.get_running_loop()
        self._sweeping = loop.call_later(seconds, self._close_idle_connections, context=Context())

    def _close_idle_connections(self) -> None:
        """Closes connections that have been idle for too long. Runs on a timer, because there might
        be no later request that could do it.
        """
        self._sweeping = None
        now = time.monotonic()
        old = []
        while self._idle and now - self._idle[0][0] >= self._idle_s:
            old.append(self._idle.popleft()[1])
        if old:
            self._all.difference_update(old)
            task = asyncio.get_running_loop().create_task(_close_connections(old))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        if self._idle:
            self._schedule_idle_close(self._idle[0][0] + self._idle_s - now)

    async def aclose(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._idle.clear()
        await asyncio.gather(_close_connections(self._all), *self._closing)
        self._all.clear()


@cache
def _default_tls_context(*authorities: str | None) -> ssl.SSLContext:
    """Returns the HTTP library's default TLS context. All pools share it, because reading the
    certificate authorities takes 30 ms of processor time.
    """
    return httpx2.create_ssl_context()


async def _close_connections(connections: Iterable[httpx2.AsyncHTTPTransport]) -> None:
    for connection in list(connections):
        await connection.aclose()


class _Body(httpx2.AsyncByteStream):
    """Body of a response. When it is closed, its connection becomes free.

    Args:
        leave: callback that returns the connection to the pool.
    """

    def __init__(self, content: httpx2.AsyncByteStream, leave: Callable[[], None]) -> None:
        self._content = content
        self._leave: Callable[[], None] | None = leave

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._content.__aiter__()

    async def aclose(self) -> None:
        leave = self._leave
        self._leave = None
        try:
            await self._content.aclose()
        finally:
            if leave is not None:
                leave()


async def _wait_for_free_connection(room: asyncio.Semaphore, request: httpx2.Request) -> None:
    """Delays a request until a connection is free, up to the request's `pool` timeout.

    Raises:
        PoolTimeout: no connection became free in time.
    """
    try:
        async with asyncio.timeout(
            request.extensions.get("timeout", {}).get("pool") if room.locked() else None
        ):
            await room.acquire()
    except TimeoutError:
        raise httpx2.PoolTimeout("no connection was free in time", request=request) from None
