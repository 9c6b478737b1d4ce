"""One end of the connection between an engine's handle and its process: sends and receives whole
frames over a socket, in order.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator

from sglang_lite.engine.frames import HEADER, MAX_BYTES, encode_frame

_READ = 1 << 20  # bytes per read
_BEAT = encode_frame([])
# macOS lacks the flag; Python ignores SIGPIPE in any case
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
_NOT_WAITING = int(socket.MSG_DONTWAIT | _NO_SIGNAL)
_send = ctypes.PyDLL(None, use_errno=True).send
_send.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int)
_send.restype = ctypes.c_ssize_t


class BrokenFrameError(Exception):
    """Error for received data that isn't a valid frame."""


class Connection:
    """Sends and receives frames over one end of a socket pair.

    Args:
        end: socket of a pair; the connection owns it.
    """

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)  # regardless of `socket.setdefaulttimeout`
        self._socket = end
        self._process = os.getpid()
        self._lock = threading.Lock()  # guards the attributes below
        self._unsent: deque[memoryview] = deque()
        self._more = threading.Condition(self._lock)
        self._writer: threading.Thread | None = None
        self._closed = False

    def send(self, frame: bytes) -> None:
        """Sends a frame without blocking. If the frame doesn't fit into the socket's buffer, a
        thread sends the rest later.

        Raises:
            BrokenPipeError: the connection is closed at either end.
        """
        with self._lock:
            if self._closed:
                raise BrokenPipeError("the connection is closed")
            rest = memoryview(frame)
            if not self._unsent:
                rest = rest[self._send_without_waiting(frame) :]
            if rest:
                self._unsent.append(rest)
                if self._writer is None:
                    self._writer = threading.Thread(
                        target=self._write_unsent, name="sglang_lite-send", daemon=True
                    )
                    self._writer.start()
                self._more.notify()

    def _send_without_waiting(self, frame: bytes) -> int:
        """Sends as much as the socket's buffer accepts now and returns the number of bytes. Does
        not release the GIL for the call, because getting it back from a computing thread could take
        milliseconds.
        """
        count: int = _send(self._socket.fileno(), frame, len(frame), _NOT_WAITING)
        if count >= 0:
            return count
        code = ctypes.get_errno()
        if code in (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR):
            return 0
        raise OSError(code, os.strerror(code))

    def send_now(self, frame: bytes) -> None:
        """Sends a frame and waits until the socket has accepted all of it. Must not be mixed with
        `send` on one connection.

        Raises:
            OSError: the connection is closed at either end.
        """
        self._socket.sendall(frame)

    def _write_unsent(self) -> None:
        while True:
            with self._lock:
                while not self._unsent and not self._closed:
                    self._more.wait()
                if self._closed:
                    self._unsent.clear()
                    return
                rest = self._unsent[0]  # stays in the queue, so that no later frame overtakes it
            try:
                sent = self._socket.send(rest, _NO_SIGNAL)
            except OSError:  # the reader also notices the broken socket
                self.close()
                continue
            with self._lock:
                if sent == len(rest):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = rest[sent:]

    def send_heartbeat(self) -> None:
        """Sends an empty frame, unless the other end has stopped reading. Must not be mixed with
        `send` on one connection, and must not run during `send_now`.

        Raises:
            OSError: the connection is closed at either end.
        """
        sent = self._send_without_waiting(_BEAT)
        if sent:
            self.send_now(_BEAT[sent:])

    def read_frames(
        self, look: Callable[[], object] = lambda: None, look_s: float = 0.0
    ) -> Iterator[memoryview]:
        """Yields the content of each received frame until either end closes the connection. A
        yielded view is valid only until the next frame is requested.

        Args:
            look: called whenever nothing has arrived for `look_s` seconds; never called if `look_s`
                is 0.

        Raises:
            BrokenFrameError: the length of a frame is above `MAX_BYTES`.
        """
        seconds, rest = divmod(look_s, 1)
        longest = struct.pack("ll", int(seconds), int(rest * 1e6))
        with contextlib.suppress(OSError):  # closed, as `recv_into` will notice
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, longest)
        unread = bytearray()
        buffer = memoryview(bytearray(_READ))
        while True:
            try:
                count = self._socket.recv_into(buffer)
            except BlockingIOError:
                look()
                continue
            except OSError:
                return
            if not count:
                return
            unread += buffer[:count]
            start = 0
            with memoryview(unread) as data:
                while len(unread) - start >= HEADER:
                    size = int.from_bytes(data[start : start + HEADER], "big")
                    if size > MAX_BYTES:
                        raise BrokenFrameError(f"a frame of {size:,} bytes")
                    if len(unread) - start - HEADER < size:
                        break
                    start += HEADER + size
                    with data[start - size : start] as content:
                        yield content
            del unread[:start]

    def close(self) -> None:
        """Closes the connection at both ends. Takes no lock, because a garbage collector may call
        it. Leaves the socket alone in a forked copy of this process.
        """
        self._closed = True
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def release_socket(self) -> None:
        """Closes the socket's descriptor. Must be called only once no thread reads from the
        connection.
        """
        self.close()
        with self._lock:
            self._more.notify()
        writer = self._writer
        if writer is not None and writer is not threading.current_thread():
            writer.join()
        self._socket.close()
