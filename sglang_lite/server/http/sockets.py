"""Socket that a server listens on."""

from __future__ import annotations

import socket

from sglang_lite.protocol import BackendError


def bound(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Socket bound to an address. Created before a model is loaded, so that a port in use is an error at once.

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
            f"can't listen on port {port} of {host}: {error}.", hint=f"Choose another port with {flag}."
        ) from error
    return found
