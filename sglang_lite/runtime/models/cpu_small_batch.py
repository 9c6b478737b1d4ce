"""Fast path of a decoder for steps with few tokens on a CPU: compiled operators between the
matmuls.
"""

from __future__ import annotations

import ctypes

import torch

from sglang_lite.runtime.host.cache_folder import cache_folder
from sglang_lite.runtime.host.cpu_library import load_cpu_library
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan
from sglang_lite.runtime.kernels.cpu_small_batch import FORMATS, SOURCE, ReadSlots, SmallBatchOps
from sglang_lite.runtime.kernels.cpu_small_batch_step import (
    BLOCK,
    PARTS,
    StepLayer,
    StepLayers,
    ThreadedSmallBatchOps,
)
from sglang_lite.runtime.kernels.cpu_small_batch_step import SOURCE as STEP
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.reference.attention import attention
from sglang_lite.runtime.models.layers.conv import gated_conv
from sglang_lite.runtime.models.layers.experts import FeedForward
from sglang_lite.runtime.models.layers.linear import block_products_in
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.spec import (
    AttentionSpec,
    ConvSpec,
    DenseSpec,
    LayerSpec,
    MixerSpec,
    ModelSpec,
)
from sglang_lite.runtime.models.weight_reader import Layer
from sglang_lite.runtime.parallel.collectives import Collectives

# Gate and up elements of one layer's feed-forward, over all tokens, up to which one thread computes
# everything between products in less time than torch takes to dispatch its operators: a third of a
# millisecond a layer.
MAX_GATE_ELEMENTS = 1 << 17
# Tokens up to which all layers in one call, where each thread normalises every token, beat torch's
# operators.
_MAX_IN_ONE_CALL = 64
# Shared keys that are read repeatedly, times the elements of a token's queries, up to which reading
# them for each row in one call is faster than reading them once with torch's operators.
MAX_REPEATED_READS = 1 << 26
# Elements of keys and values, times threads, up to which one thread reads them before all threads
# would have started.
MAX_SINGLE_THREAD_READS = 1 << 23


class SmallBatchStep:
    """Computes a decoder's steps on a CPU when they have few tokens.

    Args:
        ops: single-threaded operators compiled for the model's dtypes.
        threaded: operators that use all threads, or None if they could not be compiled.
        layers: layers of the model; `small_batch_step` has checked that they are of the supported
            kind.
        norm: weight of the norm after the layers.
        eps: epsilon of all norms.
        ranks: collectives of the ranks that share the model.
    """

    def __init__(
        self,
        ops: SmallBatchOps,
        threaded: ThreadedSmallBatchOps | None,
        layers: list[Layer],
        norm: torch.Tensor,
        eps: float,
        ranks: Collectives,
    ) -> None:
        self._ops = ops
        self._threaded = threaded
        self._ranks = ranks
        self._layers = layers
        self._last_norm = norm
        self._eps = eps
        largest = max(
            layer.spec.feed_forward.size
            for layer in layers
            if isinstance(layer.spec.feed_forward, DenseSpec)
        )
        heads = (
            layer.spec.attention
            for layer in layers
            if isinstance(layer.spec.attention, AttentionSpec)
        )
        self._width = max(each.heads * each.key_size for each in heads)
        self._max_tokens = max(MAX_GATE_ELEMENTS // (2 * largest), 1)
        self._in_one_call = (
            _pack_layers(layers, norm, eps) if threaded and ranks.parallel.tp == 1 else None
        )
        self._max_in_one_call = _MAX_IN_ONE_CALL if self._in_one_call else 0

    def supports(self, plan: AttentionPlan) -> bool:
        """Returns whether this step can compute a batch with this plan."""
        tokens = len(plan.store_at)
        if plan.both_ways:
            return False
        if tokens > self._max_in_one_call or not plan.groups:
            return tokens <= max(self._max_tokens, self._max_in_one_call) and not plan.groups
        repeated = sum((len(group.rows) - 1) * group.length for group in plan.groups)
        return repeated * self._width <= MAX_REPEATED_READS

    def __call__(
        self,
        x: torch.Tensor,
        ropes: list[tuple[torch.Tensor, torch.Tensor]],
        plan: AttentionPlan,
        cache: KVCache,
    ) -> torch.Tensor:
        """Computes hidden states [T, hidden_size] as `Decoder.forward` does. Overwrites the
        embeddings x.

        Args:
            x: embeddings of the tokens [T, hidden_size].
            ropes: cos and sin of the tokens' positions, for each rotary table.
            plan: attention plan that `supports` accepts.
            cache: KV cache.
        """
        ops = self._ops
        every = ReadSlots.from_plan(plan)
        added = None
        windowed = every if plan.windowed is None else ReadSlots.from_plan(plan.windowed)
        if self._threaded and self._in_one_call and len(x) <= self._max_in_one_call:
            store_at = plan.store_at, plan.in_layer(1).store_at
            adapters = None if plan.lora is None else plan.lora.compiled
            return self._threaded.run(
                self._in_one_call, x, ropes, store_at, (every, windowed), cache, adapters
            )
        tokens = int(every.lengths.sum())
        for i, layer in enumerate(self._layers):
            mlp = layer.feed_forward
            assert isinstance(mlp, FeedForward)
            assert layer.input_norm is not None
            assert layer.mlp_norm is not None
            lora = None if plan.lora is None else plan.lora.layer(i)
            normed = ops.add_norm(x, added, layer.input_norm, self._eps)
            qkv = (
                layer.qkv(normed)
                if lora is None
                else lora.add_adapter_deltas("qkv", normed, layer.qkv(normed))
            )
            seen = plan.in_layer(layer.spec.attention.window)
            if layer.kernel is not None:
                attended = gated_conv(layer.kernel, qkv, seen, cache, i)
            else:
                reads = every if seen is plan else windowed
                rope = ropes[layer.rope]
                attended = self._attend(i, layer, qkv, rope, seen, reads, tokens, cache)
            added = (
                layer.output(attended)
                if lora is None
                else lora.add_adapter_deltas("output", attended, layer.output(attended))
            )
            normed = ops.add_norm(x, self._ranks.sum(added), layer.mlp_norm, self._eps)
            gate_up = (
                mlp.gate_up(normed)
                if lora is None
                else lora.add_adapter_deltas("gate_up", normed, mlp.gate_up(normed))
            )
            inner = ops.silu_mul(gate_up)
            added = self._ranks.sum(
                mlp.down(inner)
                if lora is None
                else lora.add_adapter_deltas("down", inner, mlp.down(inner))
            )
        return ops.add_norm(x, added, self._last_norm, self._eps)

    def _attend(
        self,
        index: int,
        layer: Layer,
        qkv: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan,
        reads: ReadSlots,
        tokens: int,
        cache: KVCache,
    ) -> torch.Tensor:
        """Stores keys and values, and returns attention outputs [T, heads * head_dim].

        Args:
            index: index of the layer.
            layer: the layer.
            qkv: output of its first linear layer.
            rope: cos and sin of the tokens' positions.
            plan: plan for the layer.
            reads: what the plan reads.
            tokens: number of tokens of all rows, without regard to a window.
            cache: KV cache.
        """
        ops = self._ops
        spec = layer.spec.attention
        assert isinstance(spec, AttentionSpec)
        keys = cache.k[index]
        values = cache.v[index]
        norms = layer.q_norm, layer.k_norm
        q = ops.rope_store(qkv, norms, self._eps, rope, keys, values, plan.store_at)
        read = tokens if spec.window is None else min(tokens, len(qkv) * spec.window)
        if 2 * read * q[0].numel() * torch.get_num_threads() <= MAX_SINGLE_THREAD_READS:
            attended = ops.attend(q, keys, values, reads, spec.window, spec.scale)
        elif self._threaded:
            attended = self._threaded.attend(q, keys, values, reads, spec.window, spec.scale)
        else:
            attended = attention(q, cache, index, plan, layer.rules)
        return attended.reshape(len(qkv), -1)


def small_batch_step(
    spec: ModelSpec,
    precision: Precision,
    layers: list[Layer],
    norm: torch.Tensor,
    device: torch.device,
    ranks: Collectives,
) -> SmallBatchStep | None:
    """Returns the fast step for a model, or None if it can't be used.

    It requires a CPU, layers of the common kind and a compiler, and is off with `batch_invariant`:
    the bits of a row would depend on the number of rows.
    """
    common = spec.norm == "rms" and all(_supports_layer(layer) for layer in spec.layers)
    formats = precision.compute, precision.cache
    if device.type != "cpu" or not common or precision.batch_invariant or formats not in FORMATS:
        return None
    folder = cache_folder() / "compiled"
    library = load_cpu_library(SOURCE, folder, ctypes.PyDLL)
    if library is None:
        return None
    threaded_library = load_cpu_library(STEP, folder)
    threaded = (
        None if threaded_library is None else ThreadedSmallBatchOps(threaded_library, *formats)
    )
    return SmallBatchStep(
        SmallBatchOps(library, *formats), threaded, layers, norm, spec.rms_eps, ranks
    )


def _pack_layers(layers: list[Layer], norm: torch.Tensor, eps: float) -> StepLayers | None:
    """Packs the layers into one record for a single compiled call. Returns None if the layers
    differ in shape or a matrix is not block-quantised.
    """
    made = []
    shapes = set()
    for layer in layers:
        mlp = layer.feed_forward
        spec = layer.spec.attention
        if not isinstance(spec, AttentionSpec):
            return None
        assert isinstance(mlp, FeedForward)
        assert isinstance(mlp.spec, DenseSpec)
        products = [
            block_products_in(linear) for linear in (layer.qkv, layer.output, mlp.gate_up, mlp.down)
        ]
        if not all(1 <= len(parts) <= PARTS for parts in products) or spec.key_size % BLOCK:
            return None
        norms = layer.input_norm, layer.mlp_norm, layer.q_norm, layer.k_norm
        made.append(
            StepLayer.from_products(
                products,
                norms,
                dtype=norm.dtype,
                window=spec.window,
                table=layer.rope,
                scale=spec.scale,
            )
        )
        shapes.add((spec.heads, spec.kv_heads, spec.key_size, mlp.spec.size))
    if len(shapes) > 1:
        return None
    ((heads, _, _, gates),) = shapes
    return StepLayers((StepLayer * len(made))(*made), norm, eps, heads, gates)


def _supports_layer(layer: LayerSpec) -> bool:
    mlp = layer.feed_forward
    return (
        _supports_mixer(layer.attention)
        and layer.feeds
        and isinstance(mlp, DenseSpec)
        and mlp.gated
        and mlp.activation == "silu"
        and mlp.gate_scale == mlp.inner_scale == 1.0
        and layer.beside is None
        and layer.norms == "before"
        and layer.residual_scale == 1.0
        and not layer.parallel
        and not layer.scaled
        and not layer.input_size
    )


def _supports_mixer(mixer: MixerSpec) -> bool:
    if isinstance(mixer, ConvSpec):
        return True
    return (
        isinstance(mixer, AttentionSpec)
        and mixer.causal
        and not mixer.sinks
        and not mixer.chunked
        and not mixer.slopes
        and mixer.output_scale == 1.0
        and not mixer.output_gate
        and mixer.softcap is None
        and mixer.clip is None
        and mixer.qk_norm in ("", "head")
        and not mixer.norms_rotated
        and not mixer.value_norm
        and not mixer.keys_as_values
        and mixer.keys_of is None
        and mixer.distance_bias is None
        and mixer.short_convs is None
        and not mixer.rope.query_growth
        and mixer.key_size == mixer.value_size
    )
