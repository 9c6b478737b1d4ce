"""Guard against network access, for tests that must not need it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

from sglang_lite.protocol import ProgramError

# What was done; "{}" is the address or name.
_SOCKET_METHODS = {
    "connect": "a connection to{} was opened",
    "connect_ex": "a connection to{} was opened",
    "bind": "a socket was bound to{}",
    "listen": "a socket listened{}",
    "sendto": "data was sent to{}",
}
_FUNCTIONS = {
    "getaddrinfo": "the name{} was looked up",
    "create_connection": "a connection to{} was opened",
}


@contextlib.contextmanager
def no_network() -> Iterator[None]:
    """Blocks network access within the `with` block. Sockets can't connect, listen or send, and
    names can't be looked up.

    Raises:
        ProgramError: inside the block, code tries to use the network.
    """

    def raise_on_call(what: str) -> Callable[..., NoReturn]:
        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            given = args[1:] if args and isinstance(args[0], socket.socket) else args
            at = next((each for each in given if isinstance(each, str | tuple)), None)
            place = (
                ""
                if at is None
                else f" {at}"
                if isinstance(at, str)
                else f" {':'.join(map(str, at[:2]))}"
            )
            problem = f"no_network(): {what.format(place)} inside its `with` block."
            raise ProgramError(problem, hint="See the traceback for who did it.")

        return refuse

    with contextlib.ExitStack() as patched:
        for name, what in _SOCKET_METHODS.items():
            patched.enter_context(mock.patch.object(socket.socket, name, raise_on_call(what)))
        for name, what in _FUNCTIONS.items():
            patched.enter_context(mock.patch.object(socket, name, raise_on_call(what)))
        yield
