"""Stores a step's keys and values in the cache, both in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import round_up_to_power_of_2


@cached_launch
@triton.jit
def _kv_store(
    k,
    v,
    at,
    k_cache,
    v_cache,
    k_token,
    k_head,
    v_token,
    v_head,
    cache_head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_H).to(tl.int64)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    exists = (head < HEADS) & (d < DIM)
    keys = tl.load(k + token * k_token + head * k_head + d, mask=exists)
    values = tl.load(v + token * v_token + head * v_head + d, mask=exists)
    target = tl.load(at + token) * DIM + head * cache_head + d
    tl.store(k_cache + target, keys.to(k_cache.dtype.element_ty), mask=exists)
    tl.store(v_cache + target, values.to(v_cache.dtype.element_ty), mask=exists)


def kv_store(
    k: torch.Tensor, v: torch.Tensor, at: torch.Tensor, cache: KVCache, layer: int
) -> None:
    """Writes keys and values [T, kv_heads, dim] to token slots `at`, int64 [T], of a cache without
    scales; the elements of a head are contiguous. Moves 4 T kv_heads dim elements.
    """
    tokens, heads, dim = k.shape
    _kv_store[(tokens,)](
        k,
        v,
        at,
        cache.k[layer],
        cache.v[layer],
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cache.k[layer].stride(0),
        HEADS=heads,
        DIM=dim,
        BLOCK_H=round_up_to_power_of_2(heads),
        BLOCK_D=round_up_to_power_of_2(dim),
        num_warps=2,
        **pdl_options(k.device),
    )
