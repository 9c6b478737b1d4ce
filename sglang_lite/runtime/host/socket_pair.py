"""Socket pair for a connection to a child process, independent of the caller's socket and descriptor settings."""

from __future__ import annotations

import socket

_FIRST = 3  # first descriptor after standard input, output and error


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Makes two connected blocking sockets, regardless of `socket.setdefaulttimeout`. Neither uses descriptor 0, 1 or
    2, even if those are closed: printed output would go into the socket, and the child process replaces them.

    Raises:
        OSError: no descriptor is free.
    """
    first, second = socket.socketpair()
    try:
        return _waiting(first), _waiting(second)
    except OSError:
        first.close()
        second.close()
        raise


def _waiting(end: socket.socket) -> socket.socket:
    import fcntl  # which Windows lacks

    if end.fileno() < _FIRST:
        moved = socket.socket(fileno=fcntl.fcntl(end.fileno(), fcntl.F_DUPFD_CLOEXEC, _FIRST))
        end.close()
        end = moved
    end.setblocking(True)
    return end
