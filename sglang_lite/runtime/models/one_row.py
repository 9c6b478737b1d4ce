"""A decoder's step of a single token on a CPU, by compiled operators between its products."""

from __future__ import annotations

import ctypes

import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendRow
from sglang_lite.runtime.kernels.cpu_library import cpu_library
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.one_row import FORMATS, SOURCE, OneRow
from sglang_lite.runtime.kernels.reference.attention import Scoring, attend_rows
from sglang_lite.runtime.models.layers.experts import FeedForward
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.reader import Layer
from sglang_lite.runtime.models.resolve import cache_folder
from sglang_lite.runtime.models.spec import AttentionSpec, DenseSpec, LatentSpec, LayerSpec, ModelSpec

# Numbers of keys and values, times threads, that one thread reads in less time than all begin to read them together.
_READ_ALONE = 1 << 23


class OneRowStep:
    """
    Args:
        operators: compiled for the formats of the model.
        layers: of the model, of whose spec `one_row_step` has made sure.
        norm: weight of the norm behind them.
        eps: of all norms.
    """

    def __init__(self, operators: OneRow, layers: list[Layer], norm: torch.Tensor, eps: float) -> None:
        self._run, self._layers, self._last_norm, self._eps = operators, layers, norm, eps

    def __call__(
        self, x: torch.Tensor, turns: list[tuple[torch.Tensor, torch.Tensor]], plan: AttentionPlan, cache: KVCache
    ) -> torch.Tensor:
        """Hidden states [1, hidden_size] of a token's embedding x, which is overwritten; as `Decoder.forward`.

        Args:
            turns: cos and sin of the position, of each rotary table.
            plan: of one row with one token.
        """
        run, at, added = self._run, int(plan.store_at[0]), None
        for i, layer in enumerate(self._layers):
            mlp = layer.feed_forward
            assert isinstance(mlp, FeedForward)
            assert layer.input_norm is not None
            assert layer.mlp_norm is not None
            qkv = layer.qkv(run.add_norm(x, added, layer.input_norm, self._eps))
            q = run.turn_store(
                qkv, (layer.q_norm, layer.k_norm), self._eps, turns[layer.rope], cache.k[i], cache.v[i], at
            )
            added = layer.output(self._attend(layer.spec.attention, q, cache.k[i], cache.v[i], plan.extends[0]))
            gate_up = mlp.gate_up(run.add_norm(x, added, layer.mlp_norm, self._eps))
            added = mlp.down(run.silu_mul(gate_up))
        return run.add_norm(x, added, self._last_norm, self._eps)

    def _attend(
        self,
        spec: AttentionSpec | LatentSpec,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        row: ExtendRow,
    ) -> torch.Tensor:
        """[1, heads * head_dim] of queries q [1, heads, head_dim]."""
        first = 0 if spec.window is None else max(0, row.length - spec.window)
        if 2 * (row.length - first) * q.numel() * torch.get_num_threads() <= _READ_ALONE:
            return self._run.attend(q, keys, values, row, first, spec.scale).view(1, -1)
        seen = attend_rows(q, keys, values, row, Scoring(spec.scale, spec.window))
        return seen.reshape(1, -1)


def one_row_step(
    spec: ModelSpec, precision: Precision, layers: list[Layer], norm: torch.Tensor, device: torch.device
) -> OneRowStep | None:
    """The step, where a model's layers are of the common kind and there is a compiler; not with `one_path`, as a row's
    bits would depend on whether there are others."""
    common = spec.norm == "rms" and all(_is_common(layer) for layer in spec.layers)
    formats = precision.compute, precision.cache
    if device.type != "cpu" or not common or precision.one_path or formats not in FORMATS:
        return None
    library = cpu_library(SOURCE, cache_folder() / "compiled", ctypes.PyDLL)
    return None if library is None else OneRowStep(OneRow(library, *formats), layers, norm, spec.rms_eps)


def _is_common(layer: LayerSpec) -> bool:
    attention, mlp = layer.attention, layer.feed_forward
    return (
        isinstance(attention, AttentionSpec) and attention.causal and not attention.sinks
        and attention.softcap is None and attention.clip is None and attention.qk_norm in ("", "head")
        and attention.key_size == attention.value_size
        and isinstance(mlp, DenseSpec) and mlp.gated and mlp.activation == "silu"
        and layer.norms == "before" and layer.residual_scale == 1.0 and not layer.parallel
    )  # fmt: skip
