"""Seeds of nodes. A seed depends on the node's place in a program, and never on the order in which
requests arrive.
"""

from __future__ import annotations

import hashlib

from sglang_lite.protocol import Unset


def derive_seed(seed: int, path: str) -> int:
    """Derives the seed of a node or an attempt from its path and the seed of its run."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest(), "big")


def seed_for_attempt(seed: int | Unset, attempt: int) -> int | Unset:
    """Returns the seed for another attempt at the same place in a program, derived from the first
    attempt's seed. UNSET stays UNSET.
    """
    return seed if isinstance(seed, Unset) else (seed + attempt * 0x9E3779B97F4A7C15) % 2**64
