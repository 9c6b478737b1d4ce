"""Virtual token ids, which stand for the placeholders of an image in a prompt.

A virtual id lies above the vocabulary, and is a hash of the image and of the position within it. So
prompts share an image in the prefix tree if and only if it is the same image. A model never embeds
these ids: it receives features of the image instead.
"""

from __future__ import annotations

import hashlib

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints

_BITS = 30  # vocabulary size + 30 bits fit in int32


def hash_to_virtual_ids(key: bytes, count: int, vocab_size: int) -> tuple[int, ...]:
    """Returns the virtual token ids of an image with this key."""
    hashes = np.frombuffer(hashlib.shake_128(key).digest(4 * count), dtype="<u4") >> (32 - _BITS)
    return tuple((hashes + np.uint32(vocab_size)).tolist())


def find_virtual_positions(tokens: Ints, vocab_size: int) -> Ints:
    """Returns the positions of virtual ids among token ids, int32."""
    return np.flatnonzero(tokens >= vocab_size).astype(np.int32)


def without_virtual_ids(tokens: Ints, vocab_size: int) -> Ints:
    """Returns the token ids without the virtual ones."""
    return (
        tokens if not len(tokens) or int(tokens.max()) < vocab_size else tokens[tokens < vocab_size]
    )
