"""Interface of attention backends on a GPU.

A backend from an installed package is one file next to this one (`flashinfer.py`, `flash_attn.py`)
that imports the package when the backend is chosen. Its name is added to `registry.py`, where the
config finds it. A backend receives:

- Queries [T, heads, head_dim] of a step's tokens; the heads of a token are contiguous, and tokens
  are `q.stride(0)` apart. The keys and values of these tokens are already in the cache.
- Keys and values of a layer [kv_heads, pages * page_size, head_dim]. A view by pages, without a
  copy, is `cache.k[layer].view(kv_heads, -1, plan.page_size, head_dim)`, which can be permuted into
  the order that a package needs.
- `cache.scales` for 8-bit keys and values, which have been divided by them. Queries are already
  multiplied by the scale of their keys; the backend multiplies each head's result by the scale of
  its values, `cache.scales.v[layer]`, float32 [kv_heads].
- `DevicePlan`, on the device: the tokens that each query reads. The first `plan.decoding` tokens
  each read the pages of their slot, `plan.page_table[slot]`, up to their own position. The
  remaining tokens are in `plan.blocks`, each of which is computed as a causal sequence at the end
  of its slot's first `position + count` tokens; the blocks cover the rest of the batch, in any
  order.

A backend whose launches depend on lengths reads them in `plan_step`, once per step, and sets
`capturable` to False. The same tests run on every backend in the registry.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules, DevicePlan
from sglang_lite.runtime.kernels.eight_bit_rows import Scales
from sglang_lite.runtime.kernels.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class AttentionRequirements:
    """What a model and its runner require of attention.

    Attributes:
        heads, kv_heads: numbers of query heads and of KV heads.
        head_dim: elements of a head's key.
        compute: data type of queries and results.
        cache: data type of keys and values.
        device: device of the model.
        max_rows: maximum number of tokens decoded in one step.
        max_chunks: maximum number of chunks of a shared prefix; 0 if prefixes are not shared.
        max_shared_rows: maximum number of tokens decoded in a step whose rows share prefixes.
        sinks: whether each head has an attention sink, a score whose weight goes to no value.
        chunked: whether each token sees only the tokens of its own chunk.
        alibi: whether scores grow with the token's position (ALiBi).
        latent: elements of a key that are also its value: the first ones of a single plane that all
            heads read. 0 if values are stored separately.
        expanded: sizes of a head's key without its rotary part, of the rotary part, and of its
            value, for keys and values expanded from latents; else None.
        batch_invariant: whether a token's bits must not depend on the batch.
        longest: longest sequence in tokens; used only if `batch_invariant`.
        both_ways: whether tokens of images see later ones, according to `DevicePlan.limits`.
    """

    heads: int
    kv_heads: int
    head_dim: int
    compute: torch.dtype
    cache: torch.dtype
    device: torch.device
    max_rows: int
    max_chunks: int
    max_shared_rows: int = 0
    sinks: bool = False
    chunked: bool = False
    alibi: bool = False
    latent: int = 0
    expanded: tuple[int, int, int] | None = None
    batch_invariant: bool = False
    longest: int = 0
    both_ways: bool = False


class Attend(Protocol):
    """Attention of a step's tokens in one layer."""

    def __call__(
        self,
        q: torch.Tensor,
        cache: KVCache,
        layer: int,
        out: torch.Tensor,
        rules: AttentionRules,
    ) -> None:
        """Computes the attention and writes it to `out`.

        Args:
            q: queries [T, heads, head_dim], multiplied by the scales of their keys if the cache has
                scales.
            cache: KV cache, with the keys and values of the step's tokens.
            layer: index of the layer.
            out: [T, heads, head_dim] (written; for latents, the first `latent` elements of each
                head).
            rules: rules of the layer, with sinks only if the model needs them.
        """
        ...


class AttendProduct(Protocol):
    """Attention of a step's tokens in one layer, computed from the output of the QKV projection.
    Does the work of `rope_store` and `Attend` together.
    """

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
        rules: AttentionRules,
    ) -> None:
        """Args: qkv, q_norm, k_norm, eps, rope, cache, layer, scales: same as for
        `kernels.rope_store.rope_store`. out, rules: same as for `Attend`.
        """
        ...


class AttendExpanded(Protocol):
    """Attention of a step's non-decoding tokens in one layer. Its keys and values are expanded from
    the latents that these tokens see.
    """

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
        """Computes the attention and writes it to `out`.

        Args:
            q: queries [T, heads, key size], not absorbed; the heads of a token are contiguous.
            keys, values: matrices [heads, key size - rotary size, rank] and [heads, rank, value
                size] that expand latents.
            cache: cache with the latents of the step's tokens.
            layer: index of the layer.
            out: [T, heads, value size] (written, except for decoding tokens).
            scale: factor of the scores.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepAttention:
    """Attention functions prepared for one step and used by all layers.

    Attributes:
        attend: attention from queries computed by `rope_store`; if `expanded` is set, only for the
            decoding tokens.
        from_product: faster attention straight from the QKV projection's output; None if the step
            has no kernel for that.
        expanded: attention of the non-decoding tokens over keys and values expanded from latents;
            None if `attend` is as fast, or for models without latents.
    """

    attend: Attend
    from_product: AttendProduct | None = None
    expanded: AttendExpanded | None = None


class ModelAttention(Protocol):
    """Attention of all layers of a model on a device.

    Attributes:
        capturable: True if a CUDA graph can contain its steps: no launch depends on the contents of
            a tensor.
        shares_prefixes: True if it reads `plan.shared`; if False, `plan.shared` must be None.
    """

    capturable: bool
    shares_prefixes: bool

    def plan_step(self, plan: DevicePlan) -> StepAttention:
        """Sets up attention for a step. Called once per step, before the first layer."""
        ...


class AttentionBackend(ModelAttention, Protocol):
    """Attention backend for layers with equal numbers and sizes of heads."""

    @staticmethod
    def unsupported_reason(requirements: AttentionRequirements) -> str | None:
        """Returns the reason why the backend can't meet the requirements, or None if it can."""
        ...

    def __init__(self, requirements: AttentionRequirements) -> None: ...
