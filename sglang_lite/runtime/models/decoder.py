"""The decoder-only transformer, one for all families: what differs is in `ModelSpec`.

Knows nothing of requests, schedules or sampling: token ids and an attention plan in, hidden states and logits out.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from sglang_lite.runtime.kernels.reference.attention import attention, store_kv
from sglang_lite.runtime.kernels.reference.kv_copy import copy_kv
from sglang_lite.runtime.models.layers.linear import (
    Linear,
    RowByRow,
    has_one_path,
    make_head,
    make_linear,
    stacked,
    stacked_shape,
)
from sglang_lite.runtime.models.layers.rope import RotaryTable, rotate
from sglang_lite.runtime.models.spec import ModelSpec, RopeSpec
from sglang_lite.runtime.models.weights.fp8 import ScaledRows
from sglang_lite.runtime.models.weights.source import Weight, WeightSource

logger = logging.getLogger("sglang_lite")


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of a model's computation.

    Attributes:
        compute: activations between layers.
        weights: of matrices that are not quantised.
        cache: keys and values.
        int8: matrices in 8 bits (CPU).
        fp8: the layers' matrices in 8-bit floating point (GPU).
        keep_fp8: those of them that a checkpoint has in 8-bit floating point (GPU).
        one_path: every row is computed the same way whatever the batch.
    """

    compute: torch.dtype
    weights: torch.dtype
    cache: torch.dtype
    int8: bool = False
    fp8: bool = False
    keep_fp8: bool = False
    one_path: bool = False

    @property
    def rounds(self) -> bool:
        """True for formats so coarse that the same row computed in another way often gives another token."""
        return self.int8 or min(self.compute.itemsize, self.cache.itemsize) < 4


@dataclass(slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    post_attention_norm: torch.Tensor | None  # only where attention's output is normalised (post_norms)
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    post_mlp_norm: torch.Tensor | None
    window: int | None


class Decoder:
    """A loaded model.

    Args:
        spec: its shape.
        source: its weights; read tensor by tensor, each exactly once.
        precision: numeric formats.
        device: where it runs.
        max_positions: longest sequence that will be run.
        watch: goes through the numbers of the layers while they are read.

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
    ) -> None:
        self.spec, self.precision, self.device = spec, precision, device
        reader = _Reader(spec, source, precision, device, fused=self.fused)
        # The largest tables first: what making them takes is free again before the layers come.
        self.rope = reader.rope(spec.rope, max_positions)
        self.local_rope = reader.rope(spec.local_rope, max_positions) if spec.local_rope else None
        self.embedding, self.head = reader.embedding_and_head()
        self.embedding_scale = torch.tensor(spec.embedding_scale, dtype=precision.compute).item()
        self.layers: list[_Layer] = []
        for i in watch(range(spec.num_layers)):
            self.layers.append(reader.layer(i))
            _return_freed_memory()
        self.norm = reader.norm("model.norm", spec.hidden_size)
        source.finish()
        self.kv_scales: KVScales | None = None  # of caches in 8 bits; `load` finds them, with this model

    def allocate_cache(self, slots: int) -> KVCache:
        spec = self.spec
        return KVCache.allocate(
            spec.num_layers, spec.num_kv_heads, slots, spec.head_dim, self.precision.cache, self.device, self.kv_scales
        )

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
        rope = self.rope.at(positions)
        local = self.local_rope.at(positions) if self.local_rope else rope
        for i, layer in enumerate(self.layers):
            cos, sin = rope if layer.window is None else local
            h = self._attention(i, layer, self._norm(x, layer.input_norm), cos, sin, plan, cache)
            if layer.post_attention_norm is not None:
                h = self._norm(h, layer.post_attention_norm)
            x = x + h
            h = self._mlp(layer, self._norm(x, layer.mlp_norm))
            if layer.post_mlp_norm is not None:
                h = self._norm(h, layer.post_mlp_norm)
            x = x + h
        return self._norm(x, self.norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 logits [R, vocab_size] of hidden states [R, hidden_size]."""
        logits = self.head(hidden).float()
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.spec.rms_eps)

    def _attention(
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        plan: AttentionPlan,
        cache: KVCache,
    ) -> torch.Tensor:
        spec = self.spec
        qkv = layer.qkv(x).view(len(x), -1, spec.head_dim)
        turned = spec.num_heads + spec.num_kv_heads
        qk, v = qkv[:, :turned], qkv[:, turned:]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._norm(qk[:, : spec.num_heads], layer.q_norm)
            k = self._norm(qk[:, spec.num_heads :], layer.k_norm)
            qk = torch.cat((q, k), 1)
        qk = rotate(qk, cos, sin)
        q = store_kv(cache, index, plan.store_at, qk[:, : spec.num_heads], qk[:, spec.num_heads :], v)
        out = attention(
            q,
            cache,
            index,
            plan,
            scale=spec.scale,
            window=layer.window,
            softcap=spec.attention_softcap,
        )
        return layer.output(out.view(len(x), -1).to(x.dtype))

    def _mlp(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(x).chunk(2, -1)
        if self.spec.activation == "silu":
            gate = F.silu(gate)
        else:
            # In 16 bits, torch computes the last elements of a thread's share differently.
            exact = gate.float() if self.precision.one_path else gate
            gate = F.gelu(exact, approximate="tanh" if self.spec.activation == "gelu_tanh" else "none").to(gate.dtype)
        return layer.down(gate.mul_(up))


def _return_freed_memory() -> None:
    """To the system: glibc keeps what is freed between things that stay, up to half as much as a small model takes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # glibc alone has it
    if trim is not None:
        trim(0)


class _Reader:
    """Takes a model's tensors out of a source by their Hugging Face names."""

    def __init__(
        self, spec: ModelSpec, source: WeightSource, precision: Precision, device: torch.device, *, fused: bool
    ) -> None:
        self.spec, self.source, self.precision, self.device = spec, source, precision, device
        self.fused = fused
        self._few: Any = None
        self._one_path: dict[tuple[int, int], bool] = {}

    def rope(self, rope: RopeSpec, positions: int) -> RotaryTable:
        dim = rope.rotary_dim or self.spec.head_dim
        divisors = self._vector("rope_freqs.weight", dim // 2) if self.source.has("rope_freqs.weight") else None
        return RotaryTable(rope, dim, positions, self.precision.compute, self.device, divisors)

    def embedding_and_head(self) -> tuple[torch.Tensor, Linear]:
        """The table of token embeddings and the product that gives logits; one tensor where both need it as it is."""
        embedding = self._table("model.embed_tokens.weight")
        if not self.spec.tied_embeddings:
            head = self.source.take("lm_head.weight", (self.spec.vocab_size, self.spec.hidden_size))
            return embedding, self.head(head)
        if self.source.has("lm_head.weight"):
            # `.bin` files repeat the table. A head that differs is meant, whatever the config says: so transformers.
            table = self._table("lm_head.weight")
            return embedding, self.head(embedding if torch.equal(table, embedding) else table)
        return embedding, self.head(embedding)

    def head(self, weight: Weight) -> Linear:
        p = self.precision
        if self.fused or p.int8 or p.weights == torch.float32:
            return self.make([weight], None, quantise=False)
        return self._steady(make_head([weight], one_path=p.one_path), *stacked_shape([weight]))

    def layer(self, i: int) -> _Layer:
        s = self.spec
        name = f"model.layers.{i}"
        q_size, kv_size = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        attn, mlp = f"{name}.self_attn", f"{name}.mlp"
        if s.architecture == "phi3":  # merged in the checkpoint already
            qkv = self.linear([f"{attn}.qkv_proj"], [q_size + 2 * kv_size], s.hidden_size, bias=False)
            gate_up = self.linear([f"{mlp}.gate_up_proj"], [2 * s.intermediate_size], s.hidden_size, bias=False)
        else:
            qkv = self.linear(
                [f"{attn}.{p}_proj" for p in "qkv"],
                [q_size, kv_size, kv_size],
                s.hidden_size,
                bias=s.qkv_bias,
            )
            gate_up = self.linear(
                [f"{mlp}.gate_proj", f"{mlp}.up_proj"],
                [s.intermediate_size] * 2,
                s.hidden_size,
                bias=s.mlp_bias,
            )
        before_mlp = "pre_feedforward_layernorm" if s.post_norms else "post_attention_layernorm"
        return _Layer(
            input_norm=self.norm(f"{name}.input_layernorm", s.hidden_size),
            qkv=qkv,
            q_norm=self.norm(f"{attn}.q_norm", s.head_dim) if s.qk_norm else None,
            k_norm=self.norm(f"{attn}.k_norm", s.head_dim) if s.qk_norm else None,
            output=self.linear([f"{attn}.o_proj"], [s.hidden_size], q_size, bias=s.output_bias),
            post_attention_norm=(
                self.norm(f"{name}.post_attention_layernorm", s.hidden_size) if s.post_norms else None
            ),
            mlp_norm=self.norm(f"{name}.{before_mlp}", s.hidden_size),
            gate_up=gate_up,
            down=self.linear([f"{mlp}.down_proj"], [s.hidden_size], s.intermediate_size, bias=s.mlp_bias),
            post_mlp_norm=self.norm(f"{name}.post_feedforward_layernorm", s.hidden_size) if s.post_norms else None,
            window=s.windows[i],
        )

    def norm(self, name: str, size: int) -> torch.Tensor:
        weight = self._vector(f"{name}.weight", size)
        return weight.float().add(self.spec.norm_offset).to(self.device, self.precision.compute)

    def linear(self, names: list[str], sizes: list[int], inputs: int, *, bias: bool) -> Linear:
        parts = [self.source.take(f"{n}.weight", (size, inputs)) for n, size in zip(names, sizes)]
        biases = [self._vector(f"{n}.bias", size) for n, size in zip(names, sizes)] if bias else None
        return self.make(parts, torch.cat(biases) if biases else None)

    def make(self, parts: list[Weight], bias: torch.Tensor | None, *, quantise: bool = True) -> Linear:
        p = self.precision
        if self.fused:
            from sglang_lite.runtime.kernels.gemv import FewRows  # needs Triton
            from sglang_lite.runtime.models.layers.gpu_linear import Fp8Linear, GpuLinear

            self._few = self._few or FewRows(self.device)
            bias = None if bias is None else bias.to(self.device, p.weights)
            outputs, inputs = stacked_shape(parts)
            eight_bits = p.fp8 or (p.keep_fp8 and all(isinstance(part, ScaledRows) for part in parts))
            if eight_bits and quantise and not (outputs % 16 or inputs % 16):
                return Fp8Linear(parts, bias, self._few, self.device)
            return GpuLinear(stacked(parts, p.weights, self.device), bias, self._few)
        linear = make_linear(
            parts,
            None if bias is None else bias.to(p.compute),
            quantise=p.int8,
            dtype=p.weights,
            device=self.device,
            one_path=p.one_path,
        )
        return self._steady(linear, *stacked_shape(parts))

    def _steady(self, linear: Linear, outputs: int, inputs: int) -> Linear:
        """The product as it is where rows do not influence each other or may do so, else row by row. Each shape is
        tried once."""
        if not self.precision.one_path:
            return linear
        if (outputs, inputs) not in self._one_path:
            steady = has_one_path(linear, inputs, self.precision.compute)
            self._one_path[outputs, inputs] = steady
            if not steady:
                logger.warning(
                    "deterministic: on this machine a product [%d, %d] in %s depends on how many rows it has, and is "
                    "computed row by row, which is slow.", outputs, inputs, self.precision.compute,
                )  # fmt: skip
        return linear if self._one_path[outputs, inputs] else RowByRow(linear)

    def _table(self, name: str) -> torch.Tensor:
        weight = self.source.take(name, (self.spec.vocab_size, self.spec.hidden_size))
        return stacked([weight], self.precision.weights, self.device)

    def _vector(self, name: str, size: int) -> torch.Tensor:
        vector = self.source.take(name, (size,))
        assert isinstance(vector, torch.Tensor), "only matrices are encoded"
        return vector
