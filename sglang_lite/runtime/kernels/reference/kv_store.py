"""Torch twin of `kernels.kv_store`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.reference import attention


def kv_store(
    k: torch.Tensor, v: torch.Tensor, at: torch.Tensor, cache: KVCache, layer: int
) -> None:
    attention.store_kv(cache, layer, at, k, k, v)
