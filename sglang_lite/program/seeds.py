"""Seeds of nodes, derived from their place in a program, never from the order of arrival."""

from __future__ import annotations

import hashlib

from sglang_lite.protocol import Unset


def derived_seed(seed: int, path: str) -> int:
    """Seed of a node or an attempt, derived from the seed of its run and its path."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest(), "big")


def reseeded(seed: int | Unset, attempt: int) -> int | Unset:
    """Seed of a further draw at the same place of a program."""
    return seed if isinstance(seed, Unset) else (seed + attempt * 0x9E3779B97F4A7C15) % 2**64
