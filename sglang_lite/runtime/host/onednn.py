"""Limits the caches of oneDNN, torch's library for matrix multiplication on CPUs.

Each shape of a product needs a compiled primitive, which takes about a millisecond to create: for
linear layers, each pair of a number of rows and a weight shape; for attention, each number of rows
and length of the context. oneDNN caches 1,024 primitives per process, and torch as many of each
kind per thread. One takes 0.25 to 1.5 MB. An engine that had seen a few thousand requests took 500
MB more than at its start. Consecutive steps have few different shapes, so smaller caches are
enough: a step whose primitives were dropped takes 3 to 6 ms more.
"""

from __future__ import annotations

import os

PRODUCTS = 64  # entries per cache; of linear layers, five weights with twelve numbers of rows each
# oneDNN's own cache, and torch's
_SIZES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def limit_primitive_caches() -> None:
    """Limits the caches to `PRODUCTS` entries each, unless the user has set their sizes.

    oneDNN reads its limit from the environment at the first product of the process, and torch at
    the first one of each kind on each thread. So the variables stay in the environment of the
    process. Removing them again while other threads read it could crash the process.
    """
    for name in _SIZES:
        if name not in os.environ:
            os.environ[name] = str(PRODUCTS)
