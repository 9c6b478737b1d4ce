"""Detects that a client has left while its connection is not being read."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from uvicorn.protocols.http.flow_control import FlowControl

_LOOK_S: Final = 0.05  # between two checks of the connection's state
_PROBE_S: Final = 1.0  # between the first two probes; the time doubles with each
_CLOSED: Final = 7  # Linux's TCP_CLOSE: the client has reset the connection
_CLOSE_WAIT: Final = 8  # the client has ended its side
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"  # the interim answer that all clients skip


class UnreadClient:
    """Notices when a client leaves while its connection is not being read. asyncio does not report
    this.

    A client that has left and one that has only closed its sending side look the same, but their
    systems answer further data differently: that of a client that has left resets the connection.
    So a client that has closed its sending side and waits for an answer is sent an interim one.

    Args:
        transport: connection of the client, which is aborted if the client has left.
        flow: flow control, which shows whether the client reads.
        may_probe: function that returns True if an interim answer can be sent now: a client that
            speaks HTTP/1.1 waits for an answer that has not begun.
    """

    def __init__(
        self, transport: asyncio.Transport, flow: FlowControl, may_probe: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._flow = flow
        self._may_probe = may_probe
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._probe_at = 0.0
        self._pause_s = _PROBE_S

    @staticmethod
    def is_supported() -> bool:
        """Returns whether this system shows the state of connections."""
        return hasattr(socket, "TCP_INFO")

    def watch(self) -> None:
        """Watches the client until `stop`."""
        if self._timer is None and self.is_supported():
            self._timer = self._loop.call_later(_LOOK_S, self._check_client_reads)

    def stop(self) -> None:
        """Ends the watch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check_client_reads(self) -> None:
        if self._transport.is_closing():
            return
        connection = self._transport.get_extra_info("socket")
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
        if state == _CLOSED:
            self._transport.abort()
            return
        now = self._loop.time()
        if (
            state == _CLOSE_WAIT
            and now >= self._probe_at
            and not self._flow.write_paused
            and self._may_probe()
        ):
            self._transport.write(_CONTINUE)
            self._probe_at = now + self._pause_s
            self._pause_s *= 2
        self._timer = self._loop.call_later(_LOOK_S, self._check_client_reads)
