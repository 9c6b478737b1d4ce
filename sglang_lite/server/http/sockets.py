"""The address that a server is reached at."""

from __future__ import annotations

import socket

from sglang_lite.protocol import BackendError


def bound(host: str, port: int) -> socket.socket:
    """A socket that has the address. Taken before a model is loaded, so that a port in use is an error at once.

    Raises:
        BackendError: it is in use, or not of this machine.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise BackendError(
            f"can't listen on port {port} of {host}: {error}.", hint="Choose another port with --port."
        ) from error
    return found
