"""Sockets of a server: binding, the limit on open files, and a timeout for clients that don't read."""

from __future__ import annotations

import logging
import socket
from typing import Final

from sglang_lite.protocol import BackendError

logger = logging.getLogger("sglang_lite.server")
_OTHER_FILES: Final = 256  # files of the engine, logs and fetches


def bind_socket(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Binds a socket to an address. Called before a model is loaded, so that a port in use is
    reported early.

    Args:
        flag: flag that gives the port.

    Raises:
        BackendError: the address is in use, or doesn't belong to this machine.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise BackendError(
            f"can't listen on port {port} of {host}: {error}.",
            hint=f"Choose another port with {flag}.",
        ) from error
    return found


def raise_open_file_limit(count: int) -> None:
    """Raises this process's limit on open files so that a number of connections fits. Warns if the
    administrator's limit is lower.

    Args:
        count: number of connections.
    """
    import resource  # POSIX only, like engines

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        room = max(hard - _OTHER_FILES, 1)
        logger.warning(
            "this system allows %d open files: start with --max-connections %d, or raise its limit.",
            hard,
            room,
        )
        wanted = hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def set_unread_timeout(connection: socket.socket, seconds: float) -> None:
    """Makes the system end a connection if the other side accepts no data for some seconds. Linux
    only; does nothing on other systems.
    """
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(round(seconds * 1000), 1)
        )
