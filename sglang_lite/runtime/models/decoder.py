"""The decoder-only transformer, one for all families: what differs is in `ModelSpec`.

Knows nothing of requests, schedules or sampling: token ids and an attention plan in, hidden states and logits out.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from sglang_lite.runtime.kernels.kv_layout import KVLayout
from sglang_lite.runtime.kernels.reference.attention import attention, store_kv
from sglang_lite.runtime.kernels.reference.kv_copy import copy_kv
from sglang_lite.runtime.models.few_tokens import few_tokens_step
from sglang_lite.runtime.models.layers.latent import latent_attention
from sglang_lite.runtime.models.layers.norm import normalised
from sglang_lite.runtime.models.layers.rope import rotate
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.reader import Layer, WeightReader
from sglang_lite.runtime.models.spec import LatentSpec, ModelSpec
from sglang_lite.runtime.models.weights.source import WeightSource


class Decoder:
    """A loaded model.

    Args:
        spec: its shape.
        source: its weights; read tensor by tensor, each exactly once.
        precision: numeric formats.
        device: where it runs.
        max_positions: longest sequence that will be run.
        watch: goes through the numbers of the layers while they are read.
        head: it gives logits; without, a head that a checkpoint has is left out.

    Raises:
        ModelError: a tensor is missing, misshapen or left over.
    """

    fused = False

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        precision: Precision,
        device: torch.device,
        max_positions: int,
        watch: Callable[[Iterable[int]], Iterable[int]] = iter,
        *,
        head: bool = True,
    ) -> None:
        self.spec, self.precision, self.device = spec, precision, device
        self.max_positions = max_positions
        reader = WeightReader(spec, source, precision, device, fused=self.fused)
        # The largest tables first: what making them takes is free again before the layers come.
        self.ropes = reader.rotary_tables(max_positions)
        self.embedding, self.head = reader.embedding_and_head() if head else (reader.embedding_alone(), no_head)
        self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=precision.compute).item()
        self.layers: list[Layer] = []
        for i in watch(range(len(spec.layers))):
            self.layers.append(reader.layer(i))
            _return_freed_memory()
        self.norm = reader.norm()
        behind = range(len(spec.layers), len(spec.layers) + spec.draft_layers)
        source.finish(tuple(f"model.layers.{i}." for i in behind))
        self._few_tokens = None if self.fused else few_tokens_step(spec, precision, self.layers, self.norm, device)
        self.kv_scales: KVScales | None = None  # of caches in 8 bits; `load` finds them, with this model

    @property
    def kv_layout(self) -> KVLayout:
        return self.spec.kv_layout

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def format(self) -> str:
        return str(self.precision.compute).removeprefix("torch.")

    @property
    def rounds(self) -> bool:
        return self.precision.rounds

    @property
    def token_bytes(self) -> int:
        return self.kv_layout.numbers * self.precision.cache.itemsize

    def allocate_cache(self, slots: int) -> KVCache:
        return KVCache.allocate(self.kv_layout, slots, self.precision.cache, self.device, self.kv_scales)

    def copy_slots(self, cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies keys and values from token slots to others; int64 [N] each."""
        copy_kv(cache, source, target)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, cache: KVCache) -> torch.Tensor:
        """Runs new tokens and stores their keys and values.

        Args:
            ids, positions: int64 [T].

        Returns:
            Hidden states [T, hidden_size] after the last norm.
        """
        x = self.embedding[ids].to(self.precision.compute)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        turns = [rope.at(positions) for rope in self.ropes]
        if self._few_tokens is not None and self._few_tokens.takes(plan):
            return self._few_tokens(x, turns, plan, cache)
        for i, layer in enumerate(self.layers):
            taken = self._norm(x, layer.input_norm)
            h = self._attention(i, layer, taken, *turns[layer.rope], plan, cache)
            if layer.spec.parallel:
                fed = taken if layer.mlp_norm is None else self._norm(x, layer.mlp_norm)
                x = x + self._added(layer, h + layer.feed_forward(fed))
                continue
            x = x + self._added(layer, self._norm(h, layer.post_attention_norm))
            h = layer.feed_forward(self._norm(x, layer.mlp_norm))
            x = x + self._added(layer, self._norm(h, layer.post_mlp_norm))
        return self._norm(x, self.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [R, vocab_size] of hidden states [R, hidden_size]."""
        logits = self.head(hidden).float()
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return x if weight is None else normalised(x, weight, self.spec.rms_eps, self.spec.norm)

    def _added(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return x if layer.spec.residual_scale == 1.0 else x * layer.spec.residual_scale

    def _attention(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        plan: AttentionPlan,
        cache: KVCache,
    ) -> torch.Tensor:
        spec = layer.spec.attention
        if isinstance(spec, LatentSpec):
            assert layer.latent is not None
            out = latent_attention(spec, layer.latent, layer.qkv(x), cos, sin, plan, cache, index)
            return layer.output(out.view(len(x), -1).to(x.dtype))
        turned = spec.heads + spec.kv_heads
        qk, v = layer.qkv(x).split_with_sizes((turned * spec.key_size, spec.kv_heads * spec.value_size), -1)
        if spec.qk_norm == "whole":
            qk = self._qk_norm(layer, qk, spec.heads * spec.key_size)
        if spec.clip is not None:
            qk, v = qk.clamp(-spec.clip, spec.clip), v.clamp(-spec.clip, spec.clip)
        qk, v = qk.view(len(x), turned, -1), v.view(len(x), spec.kv_heads, -1)
        if spec.qk_norm in ("head", "heads"):
            qk = self._qk_norm(layer, qk, spec.heads)
        q, k = rotate(qk, cos, sin).split_with_sizes((spec.heads, spec.kv_heads), 1)
        q = store_kv(cache, index, plan.store_at, q, k, v)
        out = attention(
            q, cache, index, plan, scale=spec.scale, window=spec.window, softcap=spec.softcap, sinks=layer.sinks,
            causal=spec.causal,
        )  # fmt: skip
        return layer.output(out.reshape(len(x), -1).to(x.dtype))

    def _qk_norm(self, layer: Layer, qk: torch.Tensor, queries: int) -> torch.Tensor:
        """Queries and keys side by side, of which the first so many are queries, each normalised."""
        q, k = qk[:, :queries], qk[:, queries:]
        return torch.cat((self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)), 1)


def no_head(hidden: torch.Tensor) -> NoReturn:
    """Head of a model that has none."""
    raise AssertionError("a model without a head gives no logits")


def _return_freed_memory() -> None:
    """To the system: glibc keeps what is freed between things that stay, up to half as much as a small model takes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # glibc alone has it
    if trim is not None:
        trim(0)
