"""uvicorn's server with limits on its connections, and a shutdown that answers every client."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette

from sglang_lite.server.connection import ClientConnection
from sglang_lite.server.lingering import Linger
from sglang_lite.server.pacing import PacedConnection, Pacer
from sglang_lite.server.service import Service
from sglang_lite.server.settings import ServerSettings

logger = logging.getLogger("sglang_lite.server")
# longest idle time of a connection; longer than a gateway's, so that the gateway closes first
_IDLE_S: Final = 75
_LAST_S: Final = 2.0  # time for clients to read the end of their answers
_LOOK_S: Final = 0.05


class HttpServer(uvicorn.Server):
    """uvicorn server with a shutdown of its own: open requests may continue for a while, and the
    rest get an error.

    Args:
        app: application to serve, as `application` makes it.
        settings: settings of the server.
    """

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        pacer = Pacer()
        clients = Counter[str]()
        linger = Linger()

        def connection(**options: Any) -> PacedConnection:  # uvicorn's own
            protocol = ClientConnection(
                **options, settings=settings, clients=clients, linger=linger
            )
            return PacedConnection(protocol, pacer)

        config = uvicorn.Config(
            app,
            port=0,  # a free one, if the caller has no listening socket
            http=connection,  # type: ignore[arg-type] # uvicorn only calls it
            # no route has web sockets, and these would bypass the limits of ClientConnection
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the server doesn't use client addresses
            timeout_keep_alive=_IDLE_S,
            lifespan="on",
            ssl_certfile=settings.ssl_certfile,
            ssl_keyfile=settings.ssl_keyfile,
            ssl_keyfile_password=settings.ssl_keyfile_password,
        )
        super().__init__(config)
        self._state = app.state
        self._drain_s = settings.drain_s
        self._hurried = False  # by a second signal

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._hurried = True
            logger.warning("second signal: open requests are ended now")
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Shuts the server down. Replaces uvicorn's method, which would cancel requests without an
        answer.

        Until the open requests have ended, the sockets answer: `/ready` says 503, and so does each
        new request. After `drain_s`, or a second signal, the engine is closed, which ends each
        request with an error in the form of its protocol.
        """
        service: Service = self._state.service
        requests: Counter[str] = self._state.gate.open
        service.shutting_down = True
        if requests:
            logger.info(
                "shutting down: %d open requests may continue for %g s",
                requests.total(),
                self._drain_s,
            )
        await self._poll_until(lambda: self._hurried or not requests, self._drain_s)
        if requests:
            logger.warning(
                "shutting down: %d requests have not ended, and get an error", requests.total()
            )
            await asyncio.to_thread(service.engine.close)
            await self._poll_until(lambda: not requests, _LAST_S)
        for server in self.servers:
            server.close()
        connections = self.server_state.connections
        tasks = self.server_state.tasks
        for each in list(connections):
            each.shutdown()
        await self._poll_until(lambda: not connections, _LAST_S)
        for each in list(connections):  # of clients that don't read
            each.transport.abort()
        await self._poll_until(lambda: not tasks, _LAST_S)
        await self.lifespan.shutdown()

    async def _poll_until(self, done: Callable[[], object], seconds: float) -> None:
        """Polls until `done()` is true, for at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not done():
                    await asyncio.sleep(_LOOK_S)
