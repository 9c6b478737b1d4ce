"""End of the line between an engine's handle and its process: whole frames over a socket, in order."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import threading
from collections import deque
from collections.abc import Iterator

from sglang_lite.engine.frames import HEADER, MOST_BYTES

_READ = 1 << 20  # bytes at a time
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)  # macOS has none; Python ignores SIGPIPE in any case
_send = ctypes.PyDLL(None, use_errno=True).send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t


class BrokenFrameError(Exception):
    """Refusal of what came and is no frame."""


class Connection:
    """
    Args:
        end: of a socket pair, which it owns.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)  # whatever `socket.setdefaulttimeout` says
        self._socket, self._process = end, os.getpid()
        self._lock = threading.Lock()  # of what is below
        self._unsent: deque[memoryview] = deque()
        self._more = threading.Condition(self._lock)
        self._writer: threading.Thread | None = None
        self._closed = False

    def send(self, frame: bytes) -> None:
        """Sends a frame without waiting for its reader: what does not fit into the socket now is sent by a thread.

        Raises:
            BrokenPipeError: the connection is closed at either end.
        """
        with self._lock:
            if self._closed:
                raise BrokenPipeError("the connection is closed")
            rest = memoryview(frame)
            if not self._unsent:
                rest = rest[self._send_some(frame) :]
            if rest:
                self._unsent.append(rest)
                if self._writer is None:
                    self._writer = threading.Thread(target=self._write, name="sglang_lite-send", daemon=True)
                    self._writer.start()
                self._more.notify()

    def _send_some(self, frame: bytes) -> int:
        """Sends what the socket takes at once. It keeps the interpreter's lock meanwhile: a thread that computes would
        not give that back for milliseconds."""
        count: int = _send(self._socket.fileno(), frame, len(frame), socket.MSG_DONTWAIT | _NO_SIGNAL)
        if count >= 0:
            return count
        code = ctypes.get_errno()
        if code in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR):
            return 0
        raise OSError(code, os.strerror(code))

    def send_now(self, frame: bytes) -> None:
        """Sends a frame and waits until the socket has taken it. For a connection on which nobody calls `send`.

        Raises:
            OSError: the connection is closed at either end.
        """
        self._socket.sendall(frame)

    def _write(self) -> None:
        while True:
            with self._lock:
                while not self._unsent and not self._closed:
                    self._more.wait()
                if self._closed:
                    self._unsent.clear()
                    return
                rest = self._unsent[0]  # stays there, so that nothing overtakes it
            try:
                sent = self._socket.send(rest, _NO_SIGNAL)
            except OSError:  # its reader hears of that, too
                self.close()
                continue
            with self._lock:
                if sent == len(rest):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = rest[sent:]

    def frames(self) -> Iterator[memoryview]:
        """The contents of all frames that come, until either end is closed. Each is valid until the next one.

        Raises:
            BrokenFrameError: a length is more than a frame may have.
        """
        unread = bytearray()
        buffer = memoryview(bytearray(_READ))
        while True:
            try:
                count = self._socket.recv_into(buffer)
            except OSError:
                return
            if not count:
                return
            unread += buffer[:count]
            start = 0
            with memoryview(unread) as data:
                while len(unread) - start >= HEADER:
                    size = int.from_bytes(data[start : start + HEADER], "big")
                    if size > MOST_BYTES:
                        raise BrokenFrameError(f"a frame of {size:,} bytes")
                    if len(unread) - start - HEADER < size:
                        break
                    start += HEADER + size
                    with data[start - size : start] as content:
                        yield content
            del unread[:start]

    def close(self) -> None:
        """Ends the connection for both ends; in a forked copy of this process for none. Takes no lock, as whoever
        collects garbage may call it."""
        self._closed = True
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Gives the descriptor back, when no thread reads any more."""
        self.close()
        with self._lock:
            self._more.notify()
        writer = self._writer
        if writer is not None and writer is not threading.current_thread():
            writer.join()
        self._socket.close()
