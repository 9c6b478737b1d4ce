"""Delays the end of connections whose clients are still sending, so that the clients can read their
last answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

_LINGER_S: Final = 5.0  # longest time that a client may send on after its last answer
_MAX_LINGERING: Final = 64  # limit, because clients over a limit must not occupy file descriptors
_READ: Final = 64 << 10


class Linger:
    """Number of a server's lingering connections, and the receive buffer that they share."""

    def __init__(self) -> None:
        self.count = 0
        self.buffer = memoryview(bytearray(_READ))

    def has_room(self) -> bool:
        return self.count < _MAX_LINGERING


class LingeringTransport:
    """Transport that lets a client that is still sending read the server's final response.

    Closing a socket with unread input resets the connection, and the client's system then discards
    any response that the client has not read yet. So if the client is still sending, `close` shuts
    down only the server's side where possible, then reads and discards input until the client
    closes too, for at most five seconds (RFC 9112, 9.6).

    Args:
        transport: the connection.
        linger: the server's lingering connections.
        is_sending: function that returns True if the client has not sent the end of a request yet.
    """

    def __init__(
        self, transport: asyncio.Transport, linger: Linger, is_sending: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._linger = linger
        self._is_sending = is_sending
        self._is_lingering = False

    def __getattr__(self, name: str) -> Any:  # whatever a transport has
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Returns whether `close` was called, or the transport is closing."""
        return self._is_lingering or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Sends data, or drops it after `close`, as other transports do."""
        if not self._is_lingering:
            self._transport.write(data)

    def close(self) -> None:
        """Closes the connection as soon as everything written is sent and the client has closed its
        side.
        """
        if self.is_closing():
            return
        can_linger = self._transport.can_write_eof()  # TLS can't end one side only
        if not (can_linger and self._is_sending() and self._linger.has_room()):
            self._transport.close()
            return
        self._is_lingering = True
        self._transport.set_protocol(_Discarding(self._transport, self._linger))
        self._transport.write_eof()
        self._transport.resume_reading()


class _Discarding(asyncio.BufferedProtocol):
    """Protocol of a lingering connection, which drops incoming data.

    Args:
        transport: the connection; its previous protocol is notified when it is lost.
        linger: the server's lingering connections.
    """

    def __init__(self, transport: asyncio.Transport, linger: Linger) -> None:
        self._before = transport.get_protocol()
        self._linger = linger
        linger.count += 1
        self._timer = asyncio.get_running_loop().call_later(_LINGER_S, transport.close)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._linger.buffer

    def buffer_updated(self, nbytes: int) -> None:
        pass

    def eof_received(self) -> None:
        """Does nothing, so that asyncio closes the transport."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._linger.count -= 1
        self._timer.cancel()
        self._before.connection_lost(exc)
