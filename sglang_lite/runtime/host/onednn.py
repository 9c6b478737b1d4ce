"""Limits the primitive caches of oneDNN, torch's library for matrix multiplication on CPUs.

Each pair of a number of rows and a weight shape needs a compiled primitive, which takes about a
millisecond to create. oneDNN caches 1,024 primitives and torch another 1,024, of 0.6 to 1.5 MB
each. An engine that had seen a few hundred different numbers of rows took 800 MB more than at its
start. Consecutive steps have few different numbers of rows, so smaller caches are enough.
"""

from __future__ import annotations

import functools
import os

import torch

PRODUCTS = 128  # primitives per cache: five shapes of weights with some 25 numbers of rows each
# oneDNN's own cache, and torch's
_SIZES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


@functools.cache
def limit_primitive_caches() -> None:
    """Limits both caches to `PRODUCTS` entries, unless the user has set their sizes. Must be called
    before the first matrix multiplication of the process.

    Both libraries read the limits from the environment at that first multiplication. Afterwards,
    the environment is restored.
    """
    unset = [name for name in _SIZES if name not in os.environ]
    os.environ.update(dict.fromkeys(unset, str(PRODUCTS)))
    try:
        row = torch.ones(1, 16)
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16), 1)  # noqa: SLF001 # torch has no other name for it
        torch.ops.mkldnn._linear_pointwise(row, weight, None, "none", [], "")  # noqa: SLF001 # torch has no other name for it
    finally:
        for name in unset:
            del os.environ[name]
