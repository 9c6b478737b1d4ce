"""uvicorn's server with the limits and the end that this one has."""

from __future__ import annotations

import logging
import math
from collections import Counter
from functools import partial
from typing import Any, Final

import uvicorn
from starlette.applications import Starlette

from sglang_lite.server.connection import Connection
from sglang_lite.server.settings import ServerSettings

logger = logging.getLogger("sglang_lite.server")
_IDLE_S: Final = 75  # longest idle time of a connection; longer than a gateway's, so that the gateway closes first


class HttpServer(uvicorn.Server):
    """uvicorn server that ends at once at a second signal of any kind.

    Args:
        app: application to serve.
        settings: settings of the server.
    """

    def __init__(self, app: Starlette, settings: ServerSettings) -> None:
        connection: Any = partial(Connection, settings=settings, clients=Counter())  # uvicorn only calls it
        config = uvicorn.Config(
            app,
            port=0,  # a free one, if the caller has no listening socket
            http=connection,
            ws="none",  # no route has web sockets, and theirs would not be such connections
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the server doesn't use client addresses
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=math.ceil(settings.drain_s),
            lifespan="on",
        )
        super().__init__(config)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.force_exit = self.should_exit  # uvicorn would also raise the signal again at its end
        self.should_exit = True
        if self.force_exit:  # uvicorn would log a traceback for each open request
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
            logger.warning("second signal: open requests are ended now")
