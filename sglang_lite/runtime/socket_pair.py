"""The line to a process of our own: two sockets that wait, whatever the caller has set or closed in its process."""

from __future__ import annotations

import fcntl
import socket

_FIRST = 3  # descriptor after those of standard input, output and error


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets. Both wait, whatever `socket.setdefaulttimeout` says; and none has a descriptor of standard
    input, output or error, where those are closed: what is printed would go there, and the new process gets its own.

    Raises:
        OSError: there are no descriptors left.
    """
    first, second = socket.socketpair()
    try:
        return _waiting(first), _waiting(second)
    except OSError:
        first.close()
        second.close()
        raise


def _waiting(end: socket.socket) -> socket.socket:
    if end.fileno() < _FIRST:
        moved = socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST))
        end.close()
        end = moved
    end.setblocking(True)
    return end
