"""The interface of attention backends on a GPU.

A package that is installed comes in by one file beside this one (`flashinfer.py`, `flash_attn.py`), which imports it
when it is chosen, and its name in `registry.py`, where the config finds it. What such a file finds:

- Queries [T, heads, head_dim] of a step's tokens; a token's heads lie side by side, tokens are `q.stride(0)` apart.
  Their own keys and values are stored already.
- Keys and values of a layer [kv_heads, pages * page_size, head_dim]. As pages, without a copy:
  `cache.k[layer].view(kv_heads, -1, plan.page_size, head_dim)`, to be permuted into the order that a package wants.
- `cache.scales`, where keys and values have 8 bits: those were divided by them. Queries come multiplied by their keys'
  scale; the result of each head is to be multiplied by its values', `cache.scales.v[layer]`, float32 [kv_heads].
- Who reads what: `DevicePlan`, on the device. The first `plan.decoding` tokens each read their slot's pages
  `plan.page_table[slot]` up to their own position. The others come in `plan.blocks` of neighbours, each to be read as a
  causal sequence at the end of its slot's first `position + count` tokens; they cover the rest of the batch, in any
  order.

Kernels whose launch depends on lengths read those in `begin`, once a step, and say that they can't be captured. The
same tests run over every backend of the registry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.fp8_rows import Scales
from sglang_lite.runtime.kernels.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class AttentionRequirements:
    """Requirements of a model and its runner on attention.

    Attributes:
        compute: of queries and results.
        cache: of keys and values.
        most_rows: decoded in one step.
        most_chunks: pieces of a shared prefix; 0 where none is shared.
        sinks: each head has a score more, whose weight goes to no value.
        latent: numbers of a key that are its value, too, the first ones of one plane that all heads read; 0 where
            values are stored apart.
        expanded: numbers of a head's key, of its turned rest, and of its value, where those are made of latents.
    """

    heads: int
    kv_heads: int
    head_dim: int
    compute: torch.dtype
    cache: torch.dtype
    device: torch.device
    most_rows: int
    most_chunks: int
    sinks: bool = False
    latent: int = 0
    expanded: tuple[int, int, int] | None = None


class Attend(Protocol):
    """Attention of a step's tokens in one layer."""

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCache,
        layer: int,
        out: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """
        Args:
            q: [T, heads, head_dim], multiplied by the scales of their keys where the cache has such.
            out: [T, heads, head_dim] (written; of latents the first `latent` numbers of each head).
            scale, window, softcap, sinks: as `reference.attention.attention`; sinks where the model needs them.
        """
        ...


class AttendProduct(Protocol):
    """Attention of a step's tokens in one layer, from their QKV product: `rope_store` and `Attend` in one."""

    def __call__(
        self,
        qkv: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        rope: tuple[torch.Tensor, torch.Tensor],
        cache: KVCache,
        layer: int,
        out: torch.Tensor,
        *,
        scales: Scales | None,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """
        Args:
            qkv, q_norm, k_norm, eps, rope, scales: as `kernels.rope_store.rope_store`.
            out, scale, window, softcap: as `Attend`.
        """
        ...


class AttendExpanded(Protocol):
    """Attention of a step's tokens but the decoding ones, by keys and values that are made of the latents that they
    see."""

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: KVCache,
        layer: int,
        out: torch.Tensor,
        *,
        scale: float,
    ) -> None:
        """
        Args:
            q: [T, heads, key size], not absorbed; a token's heads lie side by side.
            keys, values: matrices, [heads, key size - turned, rank] and [heads, rank, value size].
            out: [T, heads, value size] (written, but for decoding tokens).
        """
        ...


@dataclass(frozen=True, slots=True)
class StepAttention:
    """Attention as begun for a step; all layers use it.

    Attributes:
        attend: of queries that `rope_store` has made; where there is `expanded`, of the decoding ones alone.
        from_product: of their QKV product, which is faster; None where the step has no such kernel.
        expanded: of the others, of latents; None where `attend` is as fast.
    """

    attend: Attend
    from_product: AttendProduct | None = None
    expanded: AttendExpanded | None = None


class ModelAttention(Protocol):
    """Attention of all layers of a model on a device.

    Attributes:
        captured: its steps can be part of a CUDA graph: what is launched depends on nothing that a tensor holds.
        shares_prefixes: it reads `plan.shared`; else that is None.
    """

    captured: bool
    shares_prefixes: bool

    def begin(self, plan: DevicePlan) -> StepAttention:
        """Called once a step, before the first layer."""
        ...


class AttentionBackend(ModelAttention, Protocol):
    """Attention of layers with the same heads."""

    @staticmethod
    def refuses(needs: AttentionRequirements) -> str | None:
        """The reason why the backend can't meet `needs`; None where it can."""
        ...

    def __init__(self, needs: AttentionRequirements) -> None: ...
