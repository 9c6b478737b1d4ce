"""Seeds of nodes: by their place in a program, never by arrival."""

from __future__ import annotations

import hashlib


def derived_seed(seed: int, path: str) -> int:
    """A node's or an attempt's own seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest(), "big")
