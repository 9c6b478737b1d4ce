"""Reader of a model's weights: walks the parameter table and builds linear layers and tables from the tensors."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.layers.experts import Experts, FeedForward
from sglang_lite.runtime.models.layers.latent import HeadProduct, LatentMatrices
from sglang_lite.runtime.models.layers.linear import (
    DenseLinear,
    Float32Linear,
    Linear,
    PairedLinear,
    RowByRow,
    block_head,
    is_batch_invariant,
    make_head,
    make_linear,
    stacked,
    stacked_rows,
    stacked_shape,
)
from sglang_lite.runtime.models.layers.rope import (
    RotaryTable,
    deinterleave_order,
    head_deinterleave_order,
    latent_query_deinterleave_order,
)
from sglang_lite.runtime.models.parameters import (
    CheckpointSlice,
    ParameterSpec,
    head_name,
    layer_parameters,
    parameters,
)
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.spec import AttentionSpec, DenseSpec, ExpertsSpec, LatentSpec, LayerSpec, ModelSpec
from sglang_lite.runtime.models.weights.fp8 import BLOCK, ScaledRows, block_quantised
from sglang_lite.runtime.models.weights.source import Blocks, EncodedMatrix, Weight, WeightSource

if TYPE_CHECKING:
    from sglang_lite.runtime.models.layers.gpu_experts import GpuExperts

logger = logging.getLogger("sglang_lite")
Table: TypeAlias = dict[tuple[str, int | None], ParameterSpec]  # parameters of a layer, by role and expert


@dataclass(slots=True)
class Layer:
    """Weights of a layer. A weight is None if the layer's spec has none.

    Attributes:
        spec: specification of the layer.
        rope: index of the layer's rotary table.
        input_norm, post_attention_norm, mlp_norm, post_mlp_norm: [hidden_size] of an RMS norm; [2, hidden_size] of a
            layer norm, weights then biases.
        q_norm, k_norm: weights in the same form with the size of a head or of the whole projection, or [heads,
            key_size] or [2, heads, key_size] if each head has its own.
        qkv: first product of attention: queries, keys and values. For latent attention: queries, or the low-rank vector
            that they are projected from, then the latent and the rotated part of the key.
        sinks: float32 [heads], scores of the attention sinks.
        latent: further matrices of latent attention.
        output: output projection of attention.
        feed_forward: dense feed-forward or experts.
    """

    spec: LayerSpec
    rope: int
    input_norm: torch.Tensor | None
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    latent: LatentMatrices | None
    output: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    feed_forward: FeedForward | Experts | GpuExperts
    post_mlp_norm: torch.Tensor | None


class WeightReader:
    """Builds a model's layers from the tensors of a weight source.

    Args:
        spec: specification of the model.
        source: source of the weights; each tensor is taken once.
        precision: numeric formats.
        device: device of the weights.
        fused: whether to build the linear layers of a GPU.
    """

    def __init__(
        self, spec: ModelSpec, source: WeightSource, precision: Precision, device: torch.device, *, fused: bool
    ) -> None:
        self.spec, self.source, self.precision, self.device = spec, source, precision, device
        self.fused = fused
        self._of_model = {p.role: p for p in parameters(spec) if p.layer is None}
        self._ropes = spec.ropes
        self._stacks: dict[str, torch.Tensor] = {}  # tensors that hold several parameters, by name, during one layer
        self._few: Any = None
        self._stay_wide = False  # True once a warning is logged that experts stay in 16 bits despite the request for 8
        self._invariant_shapes: dict[tuple[int, int], bool] = {}

    def rotary_tables(self, positions: int) -> list[RotaryTable]:
        """Rotary tables for `positions` positions, one for each of the spec's ropes."""
        name = "rope_freqs.weight"  # in GGUF files; applies to all layers
        size = (self._ropes[0].rotary_dim or self._head_size()) // 2
        divisors = self.source.take(name, (size,)) if self.source.has(name) else None
        assert not isinstance(divisors, EncodedMatrix), "only matrices are encoded"
        p = self.precision
        return [RotaryTable(r, self._head_size(), positions, p.compute, self.device, divisors) for r in self._ropes]

    def _head_size(self) -> int:
        return self.spec.layers[0].attention.key_size

    def embedding_and_head(self) -> tuple[torch.Tensor | Blocks, Linear]:
        """Table of token embeddings, and the product that computes logits. They share a tensor if the formats allow."""
        kept = self._take(self._of_model["embedding"])
        embedding = self._embedding(kept)
        bias = self._vector(self._of_model["head_bias"]).float() if self.spec.head_bias else None
        if not self.spec.tied_embeddings:
            return embedding, self._head(self._take(self._of_model["head"]), bias)
        if self.source.has(name := f"{head_name(self.spec)}.weight"):
            # `.bin` files repeat the table. A head that differs is used, whatever the config says, as in transformers.
            shape = (self.spec.vocab_size, self.spec.hidden_size)
            again = self.source.take(name, shape)
            table = stacked([again], self.precision.weights, self.device)
            same = isinstance(embedding, torch.Tensor) and torch.equal(table, embedding)
            return embedding, self._head(embedding if same else table, bias, again)
        return embedding, self._head(embedding, bias, kept)

    def embedding_alone(self) -> torch.Tensor | Blocks:
        """Table of token embeddings, for a model that is loaded without its head."""
        for kind in ("weight", "bias"):
            self.source.ignore(f"{head_name(self.spec)}.{kind}")
        return self._embedding(self._take(self._of_model["embedding"]))

    def _embedding(self, table: Weight) -> torch.Tensor | Blocks:
        if self.precision.blocks and isinstance(table, Blocks):
            return table
        return stacked([table], self.precision.weights, self.device)

    def norm(self) -> torch.Tensor:
        """Weight of the norm before the head, in the form described in `Layer`, or ones if the model has none."""
        return self._norm(self._of_model.get("norm"), self._of_model.get("norm_bias"))

    def layer(self, index: int) -> Layer:
        spec = self.spec.layers[index]
        table: Table = {(p.role, p.expert): p for p in layer_parameters(self.spec, index)}
        norms = {
            role: self._norm(table.get((role, None)), table.get((f"{role}_bias", None)))
            for role in (*spec.hidden_norms, *(role for role, _ in table if role.endswith("a_norm")))
        }
        sinks, attention = table.get(("sinks", None)), spec.attention
        layer = Layer(
            spec=spec,
            rope=self._ropes.index(attention.rope),
            input_norm=norms.get("input_norm"),
            qkv=self._linear(table, _first_roles(attention), order=deinterleave_order(attention)),
            q_norm=self._head_norm(table, "q_norm", attention),
            k_norm=self._head_norm(table, "k_norm", attention),
            sinks=None if sinks is None else self._vector(sinks).float().to(self.device),
            latent=self._latent(table, attention, norms) if isinstance(attention, LatentSpec) else None,
            output=self._linear(table, ("o",)),
            post_attention_norm=norms.get("attention_out_norm"),
            mlp_norm=norms.get("mlp_norm"),
            feed_forward=(
                self._feed_forward(table, "", spec.feed_forward)
                if isinstance(spec.feed_forward, DenseSpec)
                else self._experts(table, spec.feed_forward)
            ),
            post_mlp_norm=norms.get("mlp_out_norm"),
        )
        self._stacks.clear()
        return layer

    def _latent(self, table: Table, spec: LatentSpec, norms: Mapping[str, torch.Tensor]) -> LatentMatrices:
        p = self.precision
        whole = stacked([self._take(table["kv_b", None])], torch.float32).view(spec.heads, -1, spec.rank)
        keys, values = whole.to(self.device, p.compute).split_with_sizes((spec.nope_size, spec.value_size), 1)
        low = spec.query_rank is not None
        return LatentMatrices(
            query_norm=norms.get("q_a_norm"),
            queries=self._linear(table, ("q_b",), order=latent_query_deinterleave_order(spec)) if low else None,
            norm=norms["kv_a_norm"],
            keys=HeadProduct(keys.contiguous(), batch_invariant=p.batch_invariant),
            values=HeadProduct(values.transpose(1, 2).contiguous(), batch_invariant=p.batch_invariant),
        )

    # ------------------------------------------------------------------------------------------- tensors

    def _place(self, parameter: ParameterSpec) -> CheckpointSlice:
        """Place in which the checkpoint stores a parameter; the first possible one if it stores none.

        Raises:
            ModelError: the checkpoint has the parameter in two places.
        """
        found = [p for p in parameter.places if p.name in self._stacks or self.source.has(p.name)]
        if len(found) > 1:
            raise ModelError(
                f"{self.source.label}: both {found[0].name} and {found[1].name} are there, and only one can be meant.",
                hint="The checkpoint mixes two ways to store experts; write it anew in one of them.",
            )
        return found[0] if found else parameter.places[0]

    def _take(self, parameter: ParameterSpec) -> Weight:
        place = self._place(parameter)
        if not place.part:
            return self.source.take(place.name, place.shape)
        if place.name not in self._stacks:
            whole = self.source.take(place.name, place.shape)
            self._stacks[place.name] = whole.decode(0, place.shape[0]) if isinstance(whole, EncodedMatrix) else whole
        whole = self._stacks[place.name]
        if place.groups > 1:
            return whole.view(place.groups, -1, *whole.shape[1:])[:, *place.part].flatten(0, 1)
        part = whole[place.part]
        return part.t() if place.inputs is not None and place.outputs > place.inputs else part

    def _vector(self, parameter: ParameterSpec) -> torch.Tensor:
        vector = self._take(parameter)
        assert isinstance(vector, torch.Tensor), "only matrices are encoded"
        return vector

    def _numbers(self, parameter: ParameterSpec) -> torch.Tensor:
        """Vector or small matrix as float32."""
        taken = self._take(parameter)
        return taken.decode(0, taken.shape[0]) if isinstance(taken, EncodedMatrix) else taken.float()

    def _norm(self, parameter: ParameterSpec | None, bias: ParameterSpec | None = None) -> torch.Tensor:
        """Weight of a norm, with its bias if it is a layer norm; ones if the norm has no parameter."""
        if parameter is None:
            weight = torch.ones(self.spec.hidden_size)
        else:
            weight = self._vector(parameter).float().add(self.spec.norm_offset)
        return self._with_bias(weight, bias).to(self.device, self.precision.compute)

    def _with_bias(self, weight: torch.Tensor, bias: ParameterSpec | None) -> torch.Tensor:
        if self.spec.norm != "layer":
            return weight
        return torch.stack((weight, torch.zeros_like(weight) if bias is None else self._vector(bias).float()))

    def _head_norm(self, table: Table, role: str, spec: AttentionSpec | LatentSpec) -> torch.Tensor | None:
        """Weight of the norm of queries or keys, in the order of the rotated elements; None for layers without it."""
        if isinstance(spec, LatentSpec) or not spec.qk_norm:
            return None
        if (role, None) in table:
            weight = self._numbers(table[role, None])
        else:
            weight = torch.stack([self._numbers(p) for (name, _), p in table.items() if name.startswith(f"{role}.")])
        weight = self._with_bias(weight + self.spec.norm_offset, table.get((f"{role}_bias", None)))
        if (order := head_deinterleave_order(spec)) is not None:
            weight = weight[..., order]
        return weight.to(self.device, self.precision.compute)

    def _matrices(self, parameters: Sequence[ParameterSpec]) -> list[Weight]:
        """Matrices to be stacked along their outputs, as a list; a single matrix if they are stored stacked."""
        places = [self._place(p) for p in parameters]
        if len({place.name for place in places}) == 1 and len(places[0].shape) == 2 and places[0].groups == 1:
            return [self.source.take(places[0].name, places[0].shape)]
        return [self._take(p) for p in parameters]

    # ------------------------------------------------------------------------------------------ products

    def _linear(
        self, table: Table, roles: tuple[str, ...], expert: int | None = None, order: torch.Tensor | None = None
    ) -> Linear:
        """Linear layer over matrices that are stacked along their outputs.

        Args:
            table: parameters of the layer.
            roles: roles of the matrices, in order.
            expert: index of the expert, or None.
            order: permutation of the outputs, or None to keep the checkpoint's order.
        """
        parts, bias = self._matrices([table[role, expert] for role in roles]), self._bias(table, roles, expert)
        if order is not None:
            parts, bias = [stacked(parts, torch.float32)[order]], None if bias is None else bias[order]
        return self._make(parts, bias)

    def _bias(self, table: Table, roles: tuple[str, ...], expert: int | None = None) -> torch.Tensor | None:
        biases = [table.get((f"{role}_bias", expert)) for role in roles]
        if not any(biases):
            return None
        sizes = [table[role, expert].shape[0] for role in roles]
        return torch.cat([torch.zeros(n) if p is None else self._vector(p).float() for n, p in zip(sizes, biases)])

    def _feed_forward(
        self, table: Table, prefix: str, spec: DenseSpec | ExpertsSpec, expert: int | None = None
    ) -> FeedForward:
        plain = isinstance(spec, DenseSpec) and not spec.gated
        gate_up = self._linear(table, (f"{prefix}up",) if plain else (f"{prefix}gate", f"{prefix}up"), expert)
        return FeedForward(
            gate_up, self._linear(table, (f"{prefix}down",), expert), spec, self.precision.batch_invariant
        )

    def _experts(self, table: Table, spec: ExpertsSpec) -> Experts | GpuExperts:
        found, gate = table.get(("correction", None)), table.get(("shared_expert_gate", None))
        router = self._router(table)
        correction = None if found is None else self._vector(found).float().to(self.device)
        shared = self._feed_forward(table, "shared_", spec) if spec.shared_size else None
        shared_gate = None if gate is None else self._float32_linear(self._take(gate), None)
        if self.fused:
            from sglang_lite.runtime.models.layers.gpu_experts import GpuExperts  # needs Triton

            matrices = self._expert_matrices(table, spec)
            return GpuExperts(spec, router, correction, matrices, shared, shared_gate)
        experts = tuple(self._feed_forward(table, "expert_", spec, expert) for expert in range(spec.count))
        return Experts(spec, router, correction, experts, shared, shared_gate)

    def _router(self, table: Table) -> Linear:
        place = self._place(table["router", None])
        weight = stacked([self._take(table["router", None])], torch.float32)
        if not weight.isfinite().all():
            raise ModelError(
                f"{self.source.label}: {place.name} has NaN or infinite elements, so it can't choose experts.",
                hint="Fetch the checkpoint again, or use another one.",
            )
        return self._float32_linear(weight, self._bias(table, ("router",)))

    def _float32_linear(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """Small but sensitive linear layer: always float32 on a CPU, and never quantised on a GPU."""
        if self.fused:
            return self._make([weight], bias, quantise=False)
        bias = None if bias is None else bias.float()
        if self.precision.batch_invariant:
            return PairedLinear(Float32Linear([weight], bias))
        return DenseLinear(stacked([weight], torch.float32), bias)

    def _expert_matrices(self, table: Table, spec: ExpertsSpec) -> Any:
        """Matrices of all experts in the form that the GPU kernels take."""
        from sglang_lite.runtime.kernels.experts import ExpertMatrices  # needs Triton

        gates_and_ups, experts = ("expert_gate", "expert_up"), range(spec.count)
        gate_up = [self._matrices([table[role, expert] for role in gates_and_ups]) for expert in experts]
        down = [self._matrices([table["expert_down", expert]]) for expert in experts]
        gate_up_bias = self._biases(table, gates_and_ups, spec)
        down_bias = self._biases(table, ("expert_down",), spec)
        p, parts = self.precision, [part for expert in (*gate_up, *down) for part in expert]
        if p.fp8 or (p.keep_fp8 and all(isinstance(part, ScaledRows) for part in parts)):
            if not any(size % BLOCK for part in parts for size in part.shape):
                (gate_up_8, gate_up_scales), (down_8, down_scales) = map(self._block_quantised, (gate_up, down))
                return ExpertMatrices(gate_up_8, down_8, gate_up_bias, down_bias, gate_up_scales, down_scales)
            if not self._stay_wide:
                self._stay_wide = True
                logger.warning("experts of %d by %d stay in 16 bits: no multiples of %d.", *parts[0].shape, BLOCK)
        return ExpertMatrices(self._stacked(gate_up), self._stacked(down), gate_up_bias, down_bias)

    def _biases(self, table: Table, roles: tuple[str, ...], spec: ExpertsSpec) -> torch.Tensor | None:
        """Biases of all experts [experts, outputs], or None if they have none."""
        biases = [self._bias(table, roles, expert) for expert in range(spec.count)]
        given = [bias for bias in biases if bias is not None]
        return torch.stack(given).to(self.device, self.precision.weights) if given else None

    def _stacked(self, experts: list[list[Weight]]) -> torch.Tensor:
        """Matrices [experts, outputs, inputs] of all experts; each expert's parts are stacked along their outputs."""
        shape = (len(experts), *stacked_shape(experts[0]))
        whole = torch.empty(shape, dtype=self.precision.weights, device=self.device)
        for matrix, parts in zip(whole, experts):
            for start, rows in stacked_rows(parts):
                matrix[start : start + len(rows)] = rows
        return whole

    def _block_quantised(self, experts: list[list[Weight]]) -> tuple[torch.Tensor, torch.Tensor]:
        """`_stacked` in 8-bit floating point, with one scale per block."""
        outputs, inputs = stacked_shape(experts[0])
        whole = torch.empty((len(experts), outputs, inputs), dtype=torch.float8_e4m3fn, device=self.device)
        scales = torch.empty((len(experts), outputs // BLOCK, inputs // BLOCK), device=self.device)
        for matrix, of_matrix, parts in zip(whole, scales, experts):
            at = 0
            for part in parts:
                end = at + part.shape[0]
                matrix[at:end], of_matrix[at // BLOCK : end // BLOCK] = block_quantised(part)
                at = end
        return whole, scales

    def _head(self, weight: Weight, bias: torch.Tensor | None, kept: Weight | None = None) -> Linear:
        """Linear layer that computes logits.

        Args:
            weight: weight in the model's format.
            bias: bias, or None.
            kept: weight as stored in the checkpoint, if that is another format; None to use `weight`.
        """
        p = self.precision
        if p.blocks and bias is None and (head := block_head(weight if kept is None else kept)) is not None:
            return head
        if self.fused or p.int8 or p.weights == torch.float32 or bias is not None:
            return self._make([weight], bias, quantise=False)
        return self._batch_invariant(make_head([weight], batch_invariant=p.batch_invariant), *stacked_shape([weight]))

    def _make(self, parts: list[Weight], bias: torch.Tensor | None, *, quantise: bool = True) -> Linear:
        p = self.precision
        if self.fused:
            from sglang_lite.runtime.kernels.gemv import SmallBatchLinear  # needs Triton
            from sglang_lite.runtime.models.layers.gpu_linear import Fp8Linear, GpuLinear

            self._few = self._few or SmallBatchLinear(self.device)
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
            batch_invariant=p.batch_invariant,
            blocks=p.blocks,
        )
        return self._batch_invariant(linear, *stacked_shape(parts))

    def _batch_invariant(self, linear: Linear, outputs: int, inputs: int) -> Linear:
        """Returns the linear layer, or with `batch_invariant` a row-by-row version if its results depend on the number
        of rows.

        Each shape is tested once.
        """
        if not self.precision.batch_invariant:
            return linear
        if (outputs, inputs) not in self._invariant_shapes:
            invariant = is_batch_invariant(linear, inputs, self.precision.compute)
            self._invariant_shapes[outputs, inputs] = invariant
            if not invariant:
                logger.warning(
                    "deterministic: on this machine a product [%d, %d] in %s depends on how many rows it has, and is "
                    "computed row by row, which is slow.", outputs, inputs, self.precision.compute,
                )  # fmt: skip
        return linear if self._invariant_shapes[outputs, inputs] else RowByRow(linear)


def _first_roles(spec: AttentionSpec | LatentSpec) -> tuple[str, ...]:
    if isinstance(spec, AttentionSpec):
        return "q", "k", "v"
    return "q" if spec.query_rank is None else "q_a", "kv_a"
