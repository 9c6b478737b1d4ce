"""Addresses at which the ranks of several machines find one another: the port of `dist_init_addr` and the next two.
Needs no torch."""

from __future__ import annotations

import re

from sglang_lite.protocol import ParameterError

NODES, GLOO, NCCL = range(3)  # what has the port, the next one, and the one behind it
_MAX_PORT = (1 << 16) - 1 - NCCL


def address(text: str | None, purpose: int = NODES) -> tuple[str, int]:
    """Host, of IPv6 without brackets, and port of machine 0 for a purpose.

    Args:
        text: `dist_init_addr`.
        purpose: NODES, GLOO or NCCL.

    Raises:
        ParameterError: the text is no host and port.
    """
    found = re.fullmatch(r"(?:\[([\d.:a-fA-F]+)\]|([^\s:\[\]]+)):(\d{1,5})", text or "")
    if found is None or not 0 < int(found[3]) <= _MAX_PORT:
        problem = f"{text!r} is no host and port of machine 0."
        raise ParameterError("dist_init_addr", problem, hint='Use one like "10.0.0.1:5000" or "[fd00::1]:5000".')
    return found[1] or found[2], int(found[3]) + purpose


def meeting(text: str | None, purpose: int) -> str:
    """Address as collectives take it; arguments and errors as of `address`."""
    host, port = address(text, purpose)
    return f"tcp://{host}:{port}"
