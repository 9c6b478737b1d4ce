"""Bounds of the caches of oneDNN, torch's library of products on CPUs.

A product is made ready once for each number of rows and each shape of weights, in about a millisecond. oneDNN keeps
1,024 of those, torch as many beside it, 0.6 to 1.5 MB each in both. So an engine that had seen a few hundred numbers of
rows took 800 MB more than at its start. Few numbers of rows follow each other, so less is enough.
"""

from __future__ import annotations

import functools
import os

import torch

PRODUCTS = 128  # that are kept: of five shapes of weights with some 25 numbers of rows
_SIZES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # oneDNN's own cache, and torch's


@functools.cache
def bound_caches() -> None:
    """Has both keep `PRODUCTS`, unless the user has set how many. To be called before the first product of the process:
    that is when they read it in the environment, which is then left as it was."""
    unset = [name for name in _SIZES if name not in os.environ]
    os.environ.update(dict.fromkeys(unset, str(PRODUCTS)))
    try:
        row = torch.ones(1, 16)
        weight = torch.ops.mkldnn._reorder_linear_weight(torch.ones(16, 16), 1)  # noqa: SLF001 # torch has no other name for it
        torch.ops.mkldnn._linear_pointwise(row, weight, None, "none", [], "")  # noqa: SLF001 # torch has no other name for it
    finally:
        for name in unset:
            del os.environ[name]
