"""Virtual token ids: those of the placeholders of an image.

Such an id lies above the vocabulary, and is a hash of the image and of the place in it. So the prefix tree shares an
image exactly when it is the same one. A model embeds none of these ids: it gets features of the image for them.
"""

from __future__ import annotations

import hashlib

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints

_BITS = 30  # vocabulary size + 30 bits are int32


def virtual_ids(key: bytes, count: int, vocab_size: int) -> tuple[int, ...]:
    """Virtual token ids of an image with this key."""
    hashes = np.frombuffer(hashlib.shake_128(key).digest(4 * count), dtype="<u4") >> (32 - _BITS)
    return tuple((hashes + np.uint32(vocab_size)).tolist())


def virtual_positions(tokens: Ints, vocab_size: int) -> Ints:
    """Positions of virtual ids among token ids, int32."""
    return np.flatnonzero(tokens >= vocab_size).astype(np.int32)


def real_ids(tokens: Ints, vocab_size: int) -> Ints:
    """Token ids without the virtual ones."""
    return tokens if not len(tokens) or int(tokens.max()) < vocab_size else tokens[tokens < vocab_size]
