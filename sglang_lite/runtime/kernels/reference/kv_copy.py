"""Torch twin of `kernels.kv_copy`. The CPU runs `copy_kv`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.kv_cache import KVCache, view_as_indexable


def copy_kv(cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies keys and values of all layers from the token slots `source` to `target`, int64 [N]
    each. All are read before any is written.
    """
    for layer in map(view_as_indexable, cache.planes):
        layer.index_copy_(1, target, layer.index_select(1, source))


class KVCopy:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache

    def __call__(self, source: torch.Tensor, target: torch.Tensor) -> None:
        copy_kv(self._cache, source, target)
