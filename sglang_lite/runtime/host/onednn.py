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
import threading

import torch

PRODUCTS = 64  # entries per cache; of linear layers, five weights with twelve numbers of rows each
# oneDNN's own cache, and torch's
_SIZES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_environment = threading.Lock()


def limit_primitive_caches() -> None:
    """Limits the caches to `PRODUCTS` entries each, unless the user has set their sizes. Must be
    called on each thread that computes, before its first product.

    oneDNN reads the limits from the environment at the first product of the process, and torch at
    the first one of each kind on each thread. Afterwards, the environment is restored.
    """
    with _environment:
        unset = [name for name in _SIZES if name not in os.environ]
        os.environ.update(dict.fromkeys(unset, str(PRODUCTS)))
        try:
            _multiply_once()
        finally:
            for name in unset:
                del os.environ[name]


def _multiply_once() -> None:
    """Computes a product of each kind that torch leaves to oneDNN."""
    row = torch.ones(1, 16)
    weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16), 1)  # noqa: SLF001 # torch has no other name for it
    torch.ops.mkldnn._linear_pointwise(row, weight, None, "none", [], "")  # noqa: SLF001 # torch has no other name for it
    # torch multiplies smaller matrices than these without oneDNN
    torch.bmm(
        torch.ones(3, 24, 64, dtype=torch.bfloat16), torch.ones(3, 64, 64, dtype=torch.bfloat16)
    )
