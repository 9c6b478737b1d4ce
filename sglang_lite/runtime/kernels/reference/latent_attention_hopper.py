"""Torch twin of `kernels.latent_attention_hopper`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import DecodeWork, DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.reference.latent_attention import latent_decode, latent_prefill, latent_prefix


def latent_decode_hopper(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    work: DecodeWork,
    out: torch.Tensor,
    *,
    rank: int,
    scale: float,
) -> None:
    latent_decode(q, cache, layer, plan, work, out, rank=rank, scale=scale)


def latent_prefix_hopper(
    q: torch.Tensor, cache: KVCache, layer: int, plan: DevicePlan, work: DecodeWork, *, rank: int, scale: float
) -> None:
    latent_prefix(q, cache, layer, plan, work, rank=rank, scale=scale)


def latent_prefill_hopper(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    out: torch.Tensor,
    *,
    rank: int,
    scale: float,
) -> None:
    latent_prefill(q, cache, layer, plan, out, rank=rank, scale=scale)
