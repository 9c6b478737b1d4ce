"""Guard against network access, for tests that must not need it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

from sglang_lite.protocol import ProgramError


@contextlib.contextmanager
def no_network() -> Iterator[None]:
    """Context in which sockets of this process can't connect, listen or send, and names can't be looked up.

    Raises:
        ProgramError: inside the block, code tries to use the network.
    """

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ProgramError("a test that needs no network tried to use it.", hint="See the traceback for who did.")

    with contextlib.ExitStack() as patched:
        for name in ("connect", "connect_ex", "bind", "listen", "sendto"):
            patched.enter_context(mock.patch.object(socket.socket, name, refuse))
        for name in ("getaddrinfo", "create_connection"):
            patched.enter_context(mock.patch.object(socket, name, refuse))
        yield
