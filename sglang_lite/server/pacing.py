"""Spreads the parsing of clients' data over the turns of the event loop, a few milliseconds in
each.

In one turn, a loop reads from all sockets that have data. If hundreds of connections send data
together, parsing or refusing all of it in one turn would block the loop, and with it every other
client.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

_READ: Final = 64 << 10  # bytes that are read from a connection in a turn
_SMALL: Final = 1024  # bytes that are parsed immediately: the size of most requests without a body
_TURN_S: Final = 0.005
_CONNECTIONS: Final = 8  # parsed in a turn, since each may begin a request


class Pacer:
    """Queue of a server's connections with unparsed data."""

    def __init__(self) -> None:
        # all connections read into it, one after the other
        self.buffer = memoryview(bytearray(_READ))
        self._waiting = deque["PacedConnection"]()

    def enqueue_connection(self, connection: PacedConnection) -> None:
        self._waiting.append(connection)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._parse)

    def _parse(self) -> None:
        end = time.perf_counter() + _TURN_S
        for _ in range(min(_CONNECTIONS, len(self._waiting))):
            self._waiting.popleft().parse()
            if time.perf_counter() > end:
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._parse)


class PacedConnection(asyncio.BufferedProtocol):
    """Connection that stops reading while its data waits to be parsed.

    Args:
        protocol: protocol that parses the data.
        pacer: queue of the server.
    """

    def __init__(self, protocol: asyncio.Protocol, pacer: Pacer) -> None:
        self._protocol = protocol
        self._pacer = pacer
        self._data = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # a stream's
        self._transport = transport
        self._protocol.connection_made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._pacer.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._pacer.buffer[:nbytes])
        if nbytes <= _SMALL and not self._data:
            self._protocol.data_received(data)
            return
        self._transport.pause_reading()
        if not self._data:
            self._pacer.enqueue_connection(self)
        self._data += data

    def parse(self) -> None:
        data = self._data
        self._data = b""
        if not self._transport.is_closing():
            self._transport.resume_reading()
            self._protocol.data_received(data)

    def eof_received(self) -> bool | None:
        return self._protocol.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()
