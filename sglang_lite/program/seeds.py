"""Seeds of nodes: by their place in a program, never by arrival."""

from __future__ import annotations

import hashlib

from sglang_lite.protocol import Unset


def derived_seed(seed: int, path: str) -> int:
    """A node's or an attempt's own seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest(), "big")


def reseeded(seed: int | Unset, attempt: int) -> int | Unset:
    """The seed of a further draw at the same place of a program."""
    return seed if isinstance(seed, Unset) else (seed + attempt * 0x9E3779B97F4A7C15) % 2**64
