"""Hashes of prefixes: polynomials in an odd number modulo 2^64, independent of how tokens are split
into nodes. Two processes get the same hash for the same tokens in the same namespace.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.pages import Ints

_BASE = 0x9E3779B97F4A7C15
_MODULUS = 2**64
_MIN_APART = 16  # minimum number of tokens between two digests
Digests: TypeAlias = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PrefixHash:
    """Length and hash of the tokens from a root to a node's end."""

    length: int
    hash: int

    @classmethod
    def for_namespace(cls, namespace: str) -> PrefixHash:
        """Returns the hash of the empty prefix in a namespace. It is derived from the namespace's
        name.
        """
        name = blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        return cls(0, int.from_bytes(name, "little"))


class PrefixHasher:
    """Computes hashes of prefixes, and caches powers of the hash's base between calls. Its methods
    can be called on any thread.
    """

    def __init__(self) -> None:
        self._powers = np.ones(1, dtype=np.uint64)

    def extend_hash(self, prefix: PrefixHash, tokens: Ints) -> PrefixHash:
        """Returns the hash of a prefix followed by `tokens`."""
        more = np.dot(
            tokens.astype(np.uint64) + np.uint64(1), self._powers_for(prefix, len(tokens))
        )
        return PrefixHash(prefix.length + len(tokens), (prefix.hash + int(more)) % _MODULUS)

    def compute_digests(self, prefix: PrefixHash, tokens: Ints, every: int) -> Digests:
        """Continues `prefix` with `tokens`, and returns the hash at each new length that is a
        multiple of `every`.
        """
        terms = (tokens.astype(np.uint64) + np.uint64(1)) * self._powers_for(prefix, len(tokens))
        first = every - prefix.length % every
        return np.cumsum(terms, dtype=np.uint64)[first - 1 :: every] + np.uint64(prefix.hash)

    def _powers_for(self, prefix: PrefixHash, count: int) -> Digests:
        length = prefix.length + count
        powers = self._powers
        if length > len(powers):
            bases = np.full(max(length, 2 * len(powers)), _BASE, dtype=np.uint64)
            bases[0] = 1
            powers = self._powers = np.cumprod(bases, dtype=np.uint64)
        return powers[prefix.length : length]


def digest_interval(page_size: int) -> int:
    """Returns the number of tokens between two digests of a prefix. It is a multiple of the page
    size.
    """
    return -(-_MIN_APART // page_size) * page_size
