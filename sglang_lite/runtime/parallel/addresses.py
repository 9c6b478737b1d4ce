"""Addresses at which ranks on several machines find each other: the port of `dist_init_addr` and
the next two. Needs no torch.
"""

from __future__ import annotations

import re

from sglang_lite.protocol import ParameterError

NODES, GLOO, NCCL = range(3)  # users of the port itself, the next one, and the one after that
_MAX_PORT = (1 << 16) - 1 - NCCL


def parse_address(text: str | None, purpose: int = NODES) -> tuple[str, int]:
    """Returns the host and port at which machine 0 listens for a purpose, such as NCCL. The port is
    that of `dist_init_addr` plus the purpose's number. An IPv6 host has no brackets.

    Args:
        text: `dist_init_addr`.
        purpose: NODES, GLOO or NCCL.

    Raises:
        ParameterError: the text is not a host and port.
    """
    found = re.fullmatch(r"(?:\[([\d.:a-fA-F]+)\]|([^\s:\[\]]+)):(\d{1,5})", text or "")
    if found is None or not 0 < int(found[3]) <= _MAX_PORT:
        problem = f"{text!r} is no host and port of machine 0."
        raise ParameterError(
            "dist_init_addr", problem, hint='Use one like "10.0.0.1:5000" or "[fd00::1]:5000".'
        )
    return found[1] or found[2], int(found[3]) + purpose


def rendezvous_url(text: str | None, purpose: int) -> str:
    """Returns the result of `parse_address` as a URL, "tcp://host:port". Arguments and errors are
    the same.
    """
    host, port = parse_address(text, purpose)
    return f"tcp://{host}:{port}"
