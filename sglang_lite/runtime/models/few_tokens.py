"""A decoder's step of few tokens on a CPU, by compiled operators between its products."""

from __future__ import annotations

import ctypes

import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan
from sglang_lite.runtime.kernels.cpu_library import cpu_library
from sglang_lite.runtime.kernels.few_tokens import FORMATS, SOURCE, FewTokens, Reads
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.reference.attention import attention
from sglang_lite.runtime.models.layers.experts import FeedForward
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.reader import Layer
from sglang_lite.runtime.models.resolve import cache_folder
from sglang_lite.runtime.models.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec

# Gates of a layer, and numbers beside them, of all tokens, up to which one thread computes what is between products in
# less time than torch takes to call its operators: a third of a millisecond a layer.
_MOST_NUMBERS = 1 << 17
# Numbers of keys and values, times threads, that one thread reads in less time than all begin to read them together.
_READ_ALONE = 1 << 23


class FewTokensStep:
    """
    Args:
        operators: compiled for the formats of the model.
        layers: of the model, of whose spec `few_tokens_step` has made sure.
        norm: weight of the norm behind them.
        eps: of all norms.
    """

    def __init__(self, operators: FewTokens, layers: list[Layer], norm: torch.Tensor, eps: float) -> None:
        self._run, self._layers, self._last_norm, self._eps = operators, layers, norm, eps
        largest = max(
            layer.spec.feed_forward.size for layer in layers if isinstance(layer.spec.feed_forward, DenseSpec)
        )
        self._most = max(_MOST_NUMBERS // (2 * largest), 1)

    def takes(self, plan: AttentionPlan) -> bool:
        """Tells whether it computes a batch."""
        return len(plan.store_at) <= self._most and not plan.groups

    def __call__(
        self, x: torch.Tensor, turns: list[tuple[torch.Tensor, torch.Tensor]], plan: AttentionPlan, cache: KVCache
    ) -> torch.Tensor:
        """Hidden states [T, hidden_size] of tokens' embeddings x, which are overwritten; as `Decoder.forward`.

        Args:
            turns: cos and sin of the positions, of each rotary table.
            plan: that `takes` takes.
        """
        run, reads, added = self._run, Reads.of(plan), None
        tokens = int(reads.lengths.sum())
        for i, layer in enumerate(self._layers):
            mlp, spec = layer.feed_forward, layer.spec.attention
            assert isinstance(mlp, FeedForward)
            assert isinstance(spec, AttentionSpec)
            assert layer.input_norm is not None
            assert layer.mlp_norm is not None
            qkv = layer.qkv(run.add_norm(x, added, layer.input_norm, self._eps))
            keys, values = cache.k[i], cache.v[i]
            q = run.turn_store(
                qkv, (layer.q_norm, layer.k_norm), self._eps, turns[layer.rope], keys, values, plan.store_at
            )
            read = tokens if spec.window is None else min(tokens, len(x) * spec.window)
            if 2 * read * q[0].numel() * torch.get_num_threads() <= _READ_ALONE:
                seen = run.attend(q, keys, values, reads, spec.window, spec.scale)
            else:
                seen = attention(q, cache, i, plan, scale=spec.scale, window=spec.window)
            added = layer.output(seen.reshape(len(x), -1))
            gate_up = mlp.gate_up(run.add_norm(x, added, layer.mlp_norm, self._eps))
            added = mlp.down(run.silu_mul(gate_up))
        return run.add_norm(x, added, self._last_norm, self._eps)


def few_tokens_step(
    spec: ModelSpec, precision: Precision, layers: list[Layer], norm: torch.Tensor, device: torch.device
) -> FewTokensStep | None:
    """The step, where a model's layers are of the common kind and there is a compiler; not with `one_path`, as a row's
    bits would depend on whether there are others."""
    common = spec.norm == "rms" and all(_is_common(layer) for layer in spec.layers)
    formats = precision.compute, precision.cache
    if device.type != "cpu" or not common or precision.one_path or formats not in FORMATS:
        return None
    library = cpu_library(SOURCE, cache_folder() / "compiled", ctypes.PyDLL)
    return None if library is None else FewTokensStep(FewTokens(library, *formats), layers, norm, spec.rms_eps)


def _is_common(layer: LayerSpec) -> bool:
    attention, mlp = layer.attention, layer.feed_forward
    return (
        isinstance(attention, AttentionSpec) and attention.causal and not attention.sinks
        and attention.softcap is None and attention.clip is None and attention.qk_norm in ("", "head")
        and attention.key_size == attention.value_size
        and isinstance(mlp, DenseSpec) and mlp.gated and mlp.activation == "silu"
        and layer.norms == "before" and layer.residual_scale == 1.0 and not layer.parallel
    )  # fmt: skip
