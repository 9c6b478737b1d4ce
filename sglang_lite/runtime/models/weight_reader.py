"""Builds linear layers and tables from a model's tensors by walking the parameter table."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.nn import functional

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.kernels.attention_metadata import AttentionRules
from sglang_lite.runtime.models.layers.cca import CcaWeights, build_cca_weights
from sglang_lite.runtime.models.layers.delta import DeltaWeights
from sglang_lite.runtime.models.layers.experts import Experts, FeedForward
from sglang_lite.runtime.models.layers.latent import HeadProduct, LatentMatrices
from sglang_lite.runtime.models.layers.layer_inputs import LayerInputs
from sglang_lite.runtime.models.layers.lightning import LightningWeights
from sglang_lite.runtime.models.layers.linear import Linear, missing_linear, stack_weights
from sglang_lite.runtime.models.layers.linear_builder import LinearBuilder
from sglang_lite.runtime.models.layers.low_rank import LowRank
from sglang_lite.runtime.models.layers.mamba import Mamba1Weights, Mamba2Weights
from sglang_lite.runtime.models.layers.message_gates import MessageGates
from sglang_lite.runtime.models.layers.mlstm import MlstmWeights
from sglang_lite.runtime.models.layers.rg_lru import RgLruWeights
from sglang_lite.runtime.models.layers.rope import RotaryTable
from sglang_lite.runtime.models.layers.router_mlp import RouterMlp
from sglang_lite.runtime.models.layers.rwkv import ChannelMix, WkvWeights, delay_kernel
from sglang_lite.runtime.models.layers.short_convs import ShortConvs, build_short_convs
from sglang_lite.runtime.models.layers.state_mixer import StateWeights
from sglang_lite.runtime.models.parameter_tensors import ParameterTensors, Table
from sglang_lite.runtime.models.parameters import (
    ATTENTION_ADDITION,
    CHANNEL_MIXES,
    DELTA_KERNELS,
    EMBEDDING_WEIGHTS,
    FEED_FORWARD_ADDITION,
    MAMBA2_KERNELS,
    MESSAGE_MATRICES,
    MESSAGE_QUERIES,
    MESSAGE_READERS,
    RESIDUAL_WEIGHTS,
    ROUTER_MATRICES,
    WKV_MIXES,
    XIELU_ROLES,
    CheckpointSlice,
    ParameterSpec,
    head_name,
    input_projection_roles,
    layer_parameters,
    mamba1_norms,
    output_factor_role,
    output_projection_role,
    parameters,
    separate_projection_roles,
    short_conv_roles,
    tensor_names,
)
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.rotary_pairs import (
    deinterleave_order,
    head_deinterleave_order,
    latent_query_deinterleave_order,
)
from sglang_lite.runtime.models.sharding import (
    NOTHING,
    rank_part_of_parameter,
    rank_spec,
    stage_layers,
    vocabulary_part,
)
from sglang_lite.runtime.models.spec import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    DenseSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LatentSpec,
    LayerSpec,
    LightningSpec,
    Mamba1Spec,
    Mamba2Spec,
    MixerSpec,
    MlstmSpec,
    ModelSpec,
    RgLruSpec,
    StateSpec,
    WkvSpec,
)
from sglang_lite.runtime.models.weights.blocks import Blocks
from sglang_lite.runtime.models.weights.source import EncodedMatrix, Weight, WeightSource
from sglang_lite.runtime.parallel.layout import ALONE, Parallel
from sglang_lite.runtime.parallel.placement import ExpertPlacement
from sglang_lite.runtime.parallel.shared_steps import SharedFeedForward

if TYPE_CHECKING:
    from sglang_lite.runtime.kernels.experts import ExpertMatrices
    from sglang_lite.runtime.models.layers.expert_stacker import ExpertStacker
    from sglang_lite.runtime.models.layers.gpu_experts import GpuExperts

T = TypeVar("T")

logger = logging.getLogger("sglang_lite")


@dataclass(slots=True)
class Layer:
    """Weights of a layer. Weights that the layer's spec lacks are None, and linear layers that it
    lacks are `missing_linear`.

    Attributes:
        spec: specification of the layer.
        rope: index of the layer's rotary table.
        input_norm, post_attention_norm, mlp_norm, post_mlp_norm: [hidden_size] of an RMS norm; [2,
            hidden_size] of a layer norm, weights then biases.
        q_norm, k_norm: weights in the same form with the size of a head or of the whole projection,
            or [heads, key_size] or [2, heads, key_size] if each head has its own.
        qkv: first linear layer of attention: queries, keys, values, and, with `output_gate`, the
            projection whose sigmoid multiplies the outputs; with `distance_bias`, the vectors that
            the bias is computed from; with `token_sinks`, the sinks. Latent attention: queries, or
            the low-rank vector that they are projected from, then the latent and the rotated part
            of the key. Of a convolution: the projections b, c and x. Of the delta rule: q, k, v, z,
            b and a. Of lightning attention: q, k, v and z. Of Mamba 2: z, x, b, c and dt. Of
            RG-LRU: x and y. Of mLSTM: q, k, v, z, i and f. Missing in RWKV.
        sinks: float32 [heads], scores of the attention sinks.
        latent: further matrices of latent attention.
        kernel: float32 [window + 1, channels], kernel of a convolution, and then its bias.
        state: further weights of a layer with a recurrent state.
        output: output projection of attention.
        beside_first, beside_output: first linear layer and output projection of the state space
            beside attention.
        feed_forward: dense feed-forward or experts.
        experts_norm, router_scale: [hidden_size], weights of the norms of the experts' and of the
            router's inputs, with `ExpertsSpec.apart`.
        shared_out_norm, experts_out_norm: [hidden_size], weights of the norms of the shared
            expert's and of the experts' outputs.
        inputs_first, inputs_output, inputs_norm: matrices of the layer's own inputs, and weight of
            the norm after them.
        layer_scale: [1], factor of the layer's result, learnt or constant.
        qkv_addition, gate_up_addition: additions to the first projections of a block's attention
            and feed-forward, or None.
        block_output, beside_norm: linear layer from a block to the input of the state space, and
            weight of the norm after it.
        convolutions: weights of attention's convolutions, or None.
        channel_mix: weights of RWKV's channel mixing besides the feed-forward's, or None.
        short_convs: weights of the layer's short convolutions, or None.
        distance_bank: [rank, extent], bank of `DistanceBiasSpec`, or None.
        distance_scale, query_scale: [heads, rank] and [heads, key_size], factors of this bias's
            vectors and of queries, applied before their norms are limited; or None.
        keys, values: linear layers of keys and values, and of the dynamic parts of their kernels, if
            they are separate from `qkv`.
        key_input_norm, value_input_norm: [hidden_size], weights of the norms of their inputs.
        depth_queries, feed_query: float32 [1 or 3, hidden_size] and [1, hidden_size], queries with
            which inputs of attention and of the feed-forward read earlier blocks; or None.
        message_gates: gates of the messages of a previous pass, or None.
        attention_sum, mlp_sum: [4, hidden_size], shift and factor of a block's output, then of the
            residual, or None.
        shared: runs this rank's `feed_forward` together with those of the other ranks, if each rank
            has its own rows.
    """

    spec: LayerSpec
    rope: int
    input_norm: torch.Tensor | None
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None
    latent: LatentMatrices | None
    kernel: torch.Tensor | None
    state: StateWeights | None
    output: Linear
    beside_first: Linear
    beside_output: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    feed_forward: FeedForward | Experts | GpuExperts
    post_mlp_norm: torch.Tensor | None
    experts_norm: torch.Tensor | None
    router_scale: torch.Tensor | None
    shared_out_norm: torch.Tensor | None
    experts_out_norm: torch.Tensor | None
    inputs_first: Linear
    inputs_output: Linear
    inputs_norm: torch.Tensor | None
    layer_scale: torch.Tensor | None
    qkv_addition: LowRank | None
    gate_up_addition: LowRank | None
    block_output: Linear
    beside_norm: torch.Tensor | None
    convolutions: CcaWeights | None
    channel_mix: ChannelMix | None
    short_convs: ShortConvs | None
    distance_bank: torch.Tensor | None
    distance_scale: torch.Tensor | None
    query_scale: torch.Tensor | None
    keys: Linear
    values: Linear
    key_input_norm: torch.Tensor | None
    value_input_norm: torch.Tensor | None
    depth_queries: torch.Tensor | None
    feed_query: torch.Tensor | None
    message_gates: MessageGates | None
    attention_sum: torch.Tensor | None
    mlp_sum: torch.Tensor | None
    shared: SharedFeedForward | None = None
    slopes: torch.Tensor | None = None

    @property
    def rules(self) -> AttentionRules:
        """Attention rules of the layer: scale, window, soft cap, sinks and causality. Must not be
        read for latent attention.
        """
        spec = self.spec.attention
        assert isinstance(spec, AttentionSpec)
        return AttentionRules(
            spec.scale,
            spec.window,
            spec.softcap,
            self.sinks,
            spec.causal,
            spec.chunked,
            self.slopes,
        )


LAYER_PARTS = tuple(
    field.name for field in fields(Layer) if field.name not in ("spec", "rope", "shared", "slopes")
)
# attributes that layers with the same block share
BLOCK_PARTS = ("input_norm", "qkv", "output", "mlp_norm", "feed_forward")


class WeightReader:
    """Builds a model's layers from the tensors of a weight source.

    Args:
        spec: specification of the whole model.
        source: source of the weights; each tensor is taken once.
        precision: numeric formats.
        device: device of the weights.
        fused: whether to build linear layers that run our GPU kernels.
        linears: builder of linear layers; None for a new one.
        parallel: layout of the ranks, and which of them this is.
        vocab_block: vocabulary parts are multiples of this many tokens.
        cuts_embedding: whether the embedding table is sharded, too.
        placement: experts held by each group of ranks; None to divide them into consecutive ranges.

    Attributes:
        of_rank: specification of the rank's part.
        layers: the rank's layers, by number.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        precision: Precision,
        device: torch.device,
        *,
        fused: bool,
        linears: LinearBuilder | None = None,
        parallel: Parallel = ALONE,
        vocab_block: int = 1,
        cuts_embedding: bool = True,
        placement: ExpertPlacement | None = None,
    ) -> None:
        self.spec = spec
        self.source = source
        self.precision = precision
        self.device = device
        self.fused = fused
        self._parallel = parallel.in_stage
        self._placement = placement
        source.expect(lambda: tensor_names(spec))
        self.of_rank = rank_spec(spec, parallel, even=fused, placement=placement)
        self.layers = stage_layers(spec, parallel)
        self._of_model = {p.role: p for p in parameters(spec) if p.layer is None}
        self._ropes = spec.ropes
        self._vocabulary = vocabulary_part(spec.vocab_size, parallel, vocab_block)
        rule = partial(
            rank_part_of_parameter,
            spec=spec,
            parallel=parallel,
            block=vocab_block,
            embedding=cuts_embedding,
            placement=placement,
        )
        self._tensors = ParameterTensors(
            source,
            lambda each: rule(each) if each.layer is None or each.layer in self.layers else NOTHING,
        )
        self.linears = linears or LinearBuilder(precision, device, fused=fused)
        self._expert_stacker: ExpertStacker | None = None
        self._lenders: dict[int, Layer] = {}  # layers whose blocks later ones use

    def rotary_tables(self, positions: int) -> list[RotaryTable]:
        """Builds rotary tables for `positions` positions, one for each of the spec's ropes."""
        name = "rope_freqs.weight"  # in GGUF files; applies to all layers
        head = self.spec.first_attention.key_size
        size = (self._ropes[0].rotary_dim or head) // 2
        divisors = self.source.take_tensor(name, (size,)) if self.source.has_tensor(name) else None
        assert not isinstance(divisors, EncodedMatrix), "only matrices are encoded"
        p = self.precision
        return [
            RotaryTable(r, head, positions, p.compute, self.device, divisors) for r in self._ropes
        ]

    def embedding_and_head(self) -> tuple[torch.Tensor | Blocks, Linear]:
        """Builds the token embedding table and the linear layer that computes logits. They share a
        tensor if the formats allow.
        """
        if not self.spec.tied_embeddings:
            return self.embedding(), self.head()
        kept = self._tensors.take_parameter(self._of_model["embedding"])
        embedding = self.embedding(kept)
        bias = self._head_bias()
        if embedding.shape[0] > len(self._vocabulary):  # only the head is sharded
            own = embedding[self._vocabulary.start : self._vocabulary.stop]
            self.source.ignore_tensor(f"{head_name(self.spec)}.weight")
            return embedding, self.linears.build_head(own, bias)
        if self.source.has_tensor(name := f"{head_name(self.spec)}.weight"):
            # `.bin` files repeat the table. A head that differs is used, whatever the config says,
            # as in transformers.
            shape = (self.spec.vocab_size, self.spec.hidden_size)
            again = self._tensors.take_parameter(
                ParameterSpec("head", shape, (CheckpointSlice(name, shape, inputs=1),))
            )
            table = stack_weights([again], self.precision.weights, self.device)
            same = isinstance(embedding, torch.Tensor) and torch.equal(table, embedding)
            return embedding, self.linears.build_head(embedding if same else table, bias, again)
        return embedding, self.linears.build_head(embedding, bias, kept)

    def embedding(self, taken: Weight | None = None) -> torch.Tensor | Blocks:
        """Builds the token embedding table. Uses `taken` if the tensor has already been taken from
        the source.
        """
        table = (
            self._tensors.take_parameter(self._of_model["embedding"]) if taken is None else taken
        )
        if self.precision.blocks and isinstance(table, Blocks):
            return table
        return stack_weights([table], self.precision.weights, self.device)

    def position_table(self) -> torch.Tensor:
        """Reads the vectors of the positions."""
        taken = self._tensors.take_parameter(self._of_model["position_table"])
        return stack_weights([taken], self.precision.compute, self.device)

    def layer_inputs(self) -> LayerInputs:
        """Reads the weights from which the inputs of all layers are computed."""
        table = self._tensors.take_parameter(self._of_model["layer_inputs"])
        projection = self._tensors.take_parameter(self._of_model["layer_inputs_projection"])
        return LayerInputs(
            stack_weights([table], self.precision.weights, self.device),
            self.linears.build_linear([projection], None),
            self._norm(self._of_model["layer_inputs_norm"]),
            self.spec.rms_eps,
        )

    def head(self) -> Linear:
        """Reads the head's own matrix and builds the linear layer that computes logits."""
        return self.linears.build_head(
            self._tensors.take_parameter(self._of_model["head"]), self._head_bias()
        )

    def _head_bias(self) -> torch.Tensor | None:
        return (
            self._tensors.take_vector(self._of_model["head_bias"]).float()
            if self.spec.head_bias
            else None
        )

    def embedding_without_head(self) -> torch.Tensor | Blocks:
        """Builds the token embedding table for a model that is loaded without its head."""
        for kind in ("weight", "bias"):
            self.source.ignore_tensor(f"{head_name(self.spec)}.{kind}")
        return self.embedding()

    def embedding_norm(self) -> torch.Tensor:
        """Reads the weight of the norm of embeddings, in the form described in `Layer`."""
        return self._norm(
            self._of_model["embedding_norm"], self._of_model.get("embedding_norm_bias")
        )

    def embedding_sum(self) -> torch.Tensor:
        """Reads the shift and the factor of embeddings, [2, hidden_size]."""
        vectors = [self._tensors.numbers(self._of_model[role]) for role in EMBEDDING_WEIGHTS]
        return torch.stack(vectors).to(self.device, self.precision.compute)

    def message_queries(self) -> torch.Tensor:
        """Reads the queries of messages, float32 [layers, 4, hidden_size], in the order of
        `MessageGates`.
        """
        own, of_keys = (
            self._tensors.numbers(self._of_model[role]).view(-1, 2, self.spec.hidden_size)
            for role in MESSAGE_QUERIES
        )
        return torch.cat((own[:, :1], of_keys, own[:, 1:]), 1).to(self.device)

    def last_query(self) -> torch.Tensor:
        """Reads the query of the attention over blocks of layers that precedes the last norm,
        float32 [1, hidden_size].
        """
        return self._tensors.numbers(self._of_model["last_query"]).to(self.device).unsqueeze(0)

    def norm(self) -> torch.Tensor:
        """Reads the weight of the norm before the head, in the form described in `Layer`. Returns
        ones if the norm has no weight.
        """
        return self._norm(self._of_model.get("norm"), self._of_model.get("norm_bias"))

    @property
    def tensors(self) -> ParameterTensors:
        """Tensors of the rank's parameters."""
        return self._tensors

    def layer(self, index: int) -> Layer:
        spec = self.of_rank.layers[index - self.layers.start]
        if spec.repeats is not None:
            return replace(self._lenders[spec.repeats], spec=spec)
        parts = {name: make() for name, make in self.layer_parts(index).items()}
        if (lender := self.of_rank.borrowed_blocks.get(index)) is not None:
            parts |= {name: getattr(self._lenders[lender], name) for name in BLOCK_PARTS}
        mixer = spec.attention
        attends = isinstance(mixer, AttentionSpec | LatentSpec)
        rope = self._ropes.index(mixer.rope) if attends else 0
        slopes = getattr(mixer, "slopes", None)
        slopes = torch.tensor(slopes, device=self.device) if slopes else None
        layer = Layer(spec=spec, rope=rope, slopes=slopes, **parts)
        lenders = (*self.of_rank.borrowed_blocks.values(), *self.of_rank.repeated_layers.values())
        if index in lenders:
            self._lenders[index] = layer
        return layer

    def layer_parts(self, index: int) -> dict[str, Callable[[], Any]]:  # any attribute of `Layer`
        """Returns a function for each attribute of `Layer` that holds weights of its own. The
        function builds the attribute's value. No two functions use the same tensor.
        """
        spec = self.of_rank.layers[index - self.layers.start]
        if spec.repeats is not None:
            return {}
        table: Table = {(p.role, p.expert): p for p in layer_parameters(self.spec, index)}
        sinks = table.get(("sinks", None))
        attention = spec.attention
        fed = spec.feed_forward

        def norm(role: str) -> torch.Tensor | None:
            if role not in spec.hidden_norms:
                return None
            return self._norm(table.get((role, None)), table.get((f"{role}_bias", None)))

        functions: dict[str, Callable[[], Any]] = {
            "input_norm": lambda: norm("input_norm"),
            "qkv": lambda: (
                self._linear(
                    table, input_projection_roles(attention), order=deinterleave_order(attention)
                )
                if input_projection_roles(attention)
                else missing_linear
            ),
            "q_norm": lambda: self._head_norm(table, "q_norm", attention),
            "k_norm": lambda: self._head_norm(table, "k_norm", attention),
            "sinks": lambda: (
                None if sinks is None else self._tensors.take_vector(sinks).float().to(self.device)
            ),
            "latent": lambda: (
                self._build_latent_matrices(table, attention)
                if isinstance(attention, LatentSpec)
                else None
            ),
            "kernel": lambda: (
                self._build_conv_kernel(table, attention)
                if isinstance(attention, ConvSpec)
                else None
            ),
            "state": lambda: self._build_state_weights(table, spec.state_mixer),
            "output": lambda: (
                self._linear(table, (output_projection_role(attention),))
                if spec.mixes
                else missing_linear
            ),
            "beside_first": lambda: (
                missing_linear
                if spec.beside is None
                else self._linear(table, input_projection_roles(spec.beside))
            ),
            "beside_output": lambda: (
                missing_linear
                if spec.beside is None
                else self._linear(table, (output_projection_role(spec.beside),))
            ),
            "post_attention_norm": lambda: norm("attention_out_norm"),
            "mlp_norm": lambda: norm("mlp_norm"),
            "feed_forward": lambda: (
                self._feed_forward(table, "", fed)
                if isinstance(fed, DenseSpec)
                else self._experts(table, fed, index)
            ),
            "post_mlp_norm": lambda: norm("mlp_out_norm"),
            "experts_norm": lambda: norm("experts_norm"),
            "router_scale": lambda: (
                self._read_numbers(table, "router_scale")
                .mul(self.spec.hidden_size**-0.5)
                .to(self.precision.compute)
                if spec.feeds_apart
                else None
            ),
            "shared_out_norm": lambda: norm("shared_out_norm"),
            "experts_out_norm": lambda: norm("experts_out_norm"),
            "inputs_first": lambda: (
                self._linear(table, ("inputs_first",)) if spec.input_size else missing_linear
            ),
            "inputs_output": lambda: (
                self._linear(table, ("inputs_output",)) if spec.input_size else missing_linear
            ),
            "inputs_norm": lambda: norm("inputs_norm"),
            "layer_scale": lambda: self._build_layer_scale(table, spec),
            "convolutions": lambda: self._build_convolutions(table, attention),
            "channel_mix": lambda: self._build_channel_mix(table, fed),
            "short_convs": lambda: self._build_short_convs(table, spec),
            "distance_bank": lambda: self._read_if_present(table, "distance_bank"),
            "distance_scale": lambda: self._read_if_present(table, "distance_scale"),
            "query_scale": lambda: self._read_if_present(table, "query_scale"),
            "keys": lambda: self._separate_linear(table, attention, "keys"),
            "values": lambda: self._separate_linear(table, attention, "values"),
            "key_input_norm": lambda: norm("key_input_norm"),
            "value_input_norm": lambda: norm("value_input_norm"),
            "depth_queries": lambda: self._depth_queries(table, "depth_queries"),
            "feed_query": lambda: self._depth_queries(table, "feed_query"),
            "message_gates": lambda: self._build_message_gates(table),
            "attention_sum": lambda: self._residual_weights(table, spec, "attention_sum"),
            "mlp_sum": lambda: self._residual_weights(table, spec, "mlp_sum"),
            "qkv_addition": lambda: self._build_addition(table, ATTENTION_ADDITION),
            "gate_up_addition": lambda: self._build_addition(table, FEED_FORWARD_ADDITION),
            "block_output": lambda: (
                missing_linear if spec.block is None else self._linear(table, ("block_output",))
            ),
            "beside_norm": lambda: (
                None if spec.block is None else self._norm(table["beside_norm", None])
            ),
        }
        borrowed = BLOCK_PARTS if index in self.of_rank.borrowed_blocks else ()
        return {
            name: partial(_build_and_free_stacks, self._tensors, make)
            for name, make in functions.items()
            if name not in borrowed
        }

    def _build_convolutions(self, table: Table, spec: MixerSpec) -> CcaWeights | None:
        if not isinstance(spec, AttentionSpec) or spec.taps is None:
            return None
        return build_cca_weights(
            first=self._read_numbers(table, "first_taps"),
            first_bias=self._read_numbers(table, "first_taps_bias"),
            second=self._read_numbers(table, "second_taps"),
            second_bias=self._read_numbers(table, "second_taps_bias"),
            scale=self._read_numbers(table, "key_factor"),
            values=spec.projected_values // 2,
        )

    def _build_layer_scale(self, table: Table, spec: LayerSpec) -> torch.Tensor | None:
        if spec.scaled:
            return self._read_numbers(table, "layer_scale").to(self.precision.compute)
        if spec.result_scale == 1.0:
            return None
        return torch.full((1,), spec.result_scale, dtype=self.precision.compute, device=self.device)

    def _build_channel_mix(self, table: Table, spec: FeedForwardSpec) -> ChannelMix | None:
        if not isinstance(spec, DenseSpec) or not spec.mixed:
            return None
        mixes = [self._read_numbers(table, role) for role in CHANNEL_MIXES]
        return ChannelMix(
            torch.stack(mixes).to(self.precision.compute),
            self._linear(table, ("channel_r",)),
            delay_kernel(self.spec.hidden_size, self.device),
        )

    def _build_short_convs(self, table: Table, spec: LayerSpec) -> ShortConvs | None:
        convs = spec.attention.short_convs if isinstance(spec.attention, AttentionSpec) else None
        if convs is None:
            return None
        taps = [self._read_numbers(table, role) for role in short_conv_roles(convs)]
        factor = output_factor_role(spec)
        number = None if factor is None else self._read_numbers(table, factor)
        return build_short_convs(convs, taps, number)

    def _read_if_present(self, table: Table, role: str) -> torch.Tensor | None:
        """Reads numbers in the dtype of activations. Returns None if the layer has no such role."""
        if (role, None) not in table:
            return None
        return self._read_numbers(table, role).to(self.precision.compute)

    def _separate_linear(self, table: Table, spec: MixerSpec, name: str) -> Linear:
        roles = separate_projection_roles(spec).get(name)
        return missing_linear if roles is None else self._linear(table, roles)

    def _build_message_gates(self, table: Table) -> MessageGates | None:
        if ("q_message_down", None) not in table:
            return None
        down, forget, gain = (
            tuple(
                self._sensitive_linear(table, f"{role}_message_{part}") for role in MESSAGE_READERS
            )
            for part in MESSAGE_MATRICES
        )
        return MessageGates(down, forget, gain, self.spec.rms_eps)

    def _depth_queries(self, table: Table, role: str) -> torch.Tensor | None:
        if (role, None) not in table:
            return None
        return self._read_numbers(table, role).view(-1, self.spec.hidden_size)

    def _residual_weights(self, table: Table, spec: LayerSpec, part: str) -> torch.Tensor | None:
        if not spec.residual_weights:
            return None
        vectors = [self._read_numbers(table, role) for role in RESIDUAL_WEIGHTS[part]]
        return torch.stack(vectors).to(self.precision.compute)

    def _build_addition(self, table: Table, roles: Sequence[Sequence[str]]) -> LowRank | None:
        """Reads low-rank additions to a block's projections. Returns None if there are none.

        Args:
            table: parameters of the layer.
            roles: for each projection, the role of its first matrix, then those of the matrices
                that are stacked in its second one.
        """
        if (roles[0][0], None) not in table:
            return None
        firsts = tuple(first for first, *_ in roles)
        return LowRank(
            self._linear(table, firsts),
            tuple(self._linear(table, tuple(seconds)) for _, *seconds in roles),
        )

    def _build_latent_matrices(self, table: Table, spec: LatentSpec) -> LatentMatrices:
        p = self.precision
        whole = stack_weights(
            [self._tensors.take_parameter(table["kv_b", None])], torch.float32
        ).view(spec.heads, -1, spec.rank)
        keys, values = whole.to(self.device, p.compute).split_with_sizes(
            (spec.nope_size, spec.value_size), 1
        )
        low = spec.query_rank is not None
        return LatentMatrices(
            query_norm=self._norm(table["q_a_norm", None]) if low else None,
            queries=self._linear(table, ("q_b",), order=latent_query_deinterleave_order(spec))
            if low
            else None,
            norm=self._norm(table["kv_a_norm", None]),
            keys=HeadProduct(keys.contiguous(), batch_invariant=p.batch_invariant),
            values=HeadProduct(
                values.transpose(1, 2).contiguous(), batch_invariant=p.batch_invariant
            ),
        )

    def _build_conv_kernel(self, table: Table, spec: ConvSpec) -> torch.Tensor:
        """Reads the kernel of a convolution, with its bias, as `Layer.kernel`."""
        kernel = self._tensors.take_vector(table["conv_kernel", None]).float()
        bias = kernel.new_zeros(spec.size)
        if spec.bias:
            bias = self._tensors.take_vector(table["conv_kernel_bias", None]).float()
        return torch.cat((kernel.T, bias.unsqueeze(0))).to(self.device)

    def _build_state_weights(self, table: Table, spec: StateSpec | None) -> StateWeights | None:
        if isinstance(spec, DeltaSpec):
            a_log = self._read_numbers(table, "delta_a_log")
            return DeltaWeights(
                kernel=self._read_state_kernel(table, DELTA_KERNELS),
                a_log=a_log,
                rate=-a_log.exp(),
                dt=self._read_numbers(table, "delta_dt"),
                norm=self._read_numbers(table, "delta_norm").to(self.precision.compute),
                gate=self._sensitive_linear(table, "delta_z_high") if spec.gate_rank else None,
                decays=self._sensitive_linear(table, "delta_a_high") if spec.gate_rank else None,
            )
        if isinstance(spec, LightningSpec):
            return LightningWeights(
                rate=-torch.tensor(spec.slopes, device=self.device),
                d=torch.zeros(spec.heads, device=self.device),
                norm=self._read_numbers(table, "lightning_norm").to(self.precision.compute),
            )
        if isinstance(spec, Mamba1Spec):
            return self._build_mamba1_weights(table, spec)
        if isinstance(spec, RgLruSpec):
            return self._build_rg_lru_weights(table)
        if isinstance(spec, MlstmSpec):
            norm = self._read_numbers(table, "mlstm_norm")
            return MlstmWeights(norm.to(self.precision.compute))
        if isinstance(spec, WkvSpec):
            return self._build_wkv_weights(table, spec)
        return None if spec is None else self._build_mamba2_weights(table, spec)

    def _build_mamba1_weights(self, table: Table, spec: Mamba1Spec) -> Mamba1Weights:
        a_log = self._read_groups(table, "mamba_a_log")
        low, steps = (
            tuple(self._sensitive_linear(table, each) for each in self._group_roles(table, role))
            for role in ("mamba_low", "mamba_steps")
        )
        return Mamba1Weights(
            kernel=self._read_state_kernel(table, MAMBA2_KERNELS[:1]),
            low=low,
            steps=steps,
            norms=tuple(self._read_numbers(table, role) for role in mamba1_norms(spec)),
            a_log=a_log,
            rate=-a_log.exp(),
            dt=self._read_groups(table, "mamba_dt_offset"),
            d=self._read_groups(table, "mamba_d"),
        )

    def _group_roles(self, table: Table, role: str) -> list[str]:
        """Returns a role for each group of this rank, if parameters are stored by group; else
        `role` itself.
        """

        def is_here(name: str) -> bool:
            return self._tensors.is_cut_for_rank(table[name, None])

        groups = [name for name, _ in table if name.startswith(f"{role}.")]
        return list(filter(is_here, groups)) or [role]

    def _read_groups(self, table: Table, role: str) -> torch.Tensor:
        return torch.cat([self._read_numbers(table, x) for x in self._group_roles(table, role)])

    def _build_mamba2_weights(self, table: Table, spec: Mamba2Spec) -> Mamba2Weights:
        compute = self.precision.compute
        a_log = self._read_numbers(table, "mamba_a_log")
        scales = [torch.full((n,), x) for n, x in zip(spec.projections, spec.scales)]
        return Mamba2Weights(
            kernel=self._read_state_kernel(table, MAMBA2_KERNELS),
            a_log=a_log,
            rate=-a_log.exp(),
            dt=self._read_numbers(table, "mamba_dt_offset"),
            d=self._read_numbers(table, "mamba_d"),
            norm=self._read_numbers(table, "mamba_norm").to(compute) if spec.norm else None,
            scales=torch.cat(scales).to(self.device, compute) if scales else None,
        )

    def _build_rg_lru_weights(self, table: Table) -> RgLruWeights:
        decay = self._read_numbers(table, "lru_decay")
        return RgLruWeights(
            kernel=self._read_state_kernel(table, ("lru_kernel",)),
            enter=self._read_numbers(table, "lru_enter").to(self.precision.compute),
            enter_offset=self._read_numbers(table, "lru_enter_offset"),
            forget=self._read_numbers(table, "lru_forget").to(self.precision.compute),
            forget_offset=self._read_numbers(table, "lru_forget_offset"),
            decay=decay,
            rate=-8 * functional.softplus(decay).unsqueeze(1),
            d=torch.zeros_like(decay),
        )

    def _build_wkv_weights(self, table: Table, spec: WkvSpec) -> WkvWeights:
        decay = self._read_numbers(table, "wkv_decay")
        mixes = [self._read_numbers(table, role) for role in WKV_MIXES]
        return WkvWeights(
            mixes=torch.stack(mixes).to(self.precision.compute),
            delay=delay_kernel(spec.inputs, self.device),
            key=self._linear(table, ("wkv_k",)),
            value=self._linear(table, ("wkv_v",)),
            receptance=self._linear(table, ("wkv_r",)),
            decay=decay,
            rate=-decay.exp(),
            first=self._read_numbers(table, "wkv_first"),
        )

    def _sensitive_linear(self, table: Table, role: str) -> Linear:
        """Reads a small matrix, which is not quantised."""
        return self.linears.build_float32(self._tensors.take_parameter(table[role, None]), None)

    def _read_numbers(self, table: Table, role: str) -> torch.Tensor:
        return self._tensors.numbers(table[role, None]).to(self.device)

    def _read_state_kernel(self, table: Table, roles: tuple[str, ...]) -> torch.Tensor:
        """Reads the kernel of a convolution before a state, with its bias or zeros."""
        kernel = torch.cat([self._read_numbers(table, role) for role in roles])
        if (f"{roles[0]}_bias", None) not in table:
            return torch.cat((kernel.T, kernel.new_zeros((1, len(kernel)))))
        bias = torch.cat([self._read_numbers(table, f"{role}_bias") for role in roles])
        return torch.cat((kernel.T, bias.unsqueeze(0)))

    # -------------------------------------------------------------------------------------- tensors

    def _norm(
        self, parameter: ParameterSpec | None, bias: ParameterSpec | None = None
    ) -> torch.Tensor:
        """Reads the weight of a norm, with its bias if it is a layer norm. Returns ones if the norm
        has no parameter.
        """
        if parameter is None:
            weight = torch.ones(self.spec.hidden_size)
        else:
            weight = self._tensors.take_vector(parameter).float().add(self.spec.norm_offset)
        return self._with_bias(weight, bias).to(self.device, self.precision.compute)

    def _with_bias(self, weight: torch.Tensor, bias: ParameterSpec | None) -> torch.Tensor:
        if self.spec.norm != "layer":
            return weight
        return torch.stack(
            (
                weight,
                torch.zeros_like(weight)
                if bias is None
                else self._tensors.take_vector(bias).float(),
            )
        )

    def _head_norm(self, table: Table, role: str, spec: MixerSpec) -> torch.Tensor | None:
        """Reads the weight of the query or key norm, with its elements in the order that `rotate`
        expects. Returns None for layers without such a norm.
        """
        if not isinstance(spec, AttentionSpec) or not spec.qk_norm:
            return None
        if role == "k_norm" and spec.keys_of is not None:
            return None
        if not spec.qk_norm_weight:
            return torch.ones(spec.key_size, dtype=self.precision.compute, device=self.device)
        if (role, None) in table:
            weight = self._tensors.numbers(table[role, None])
        else:
            all_heads = [p for (name, _), p in table.items() if name.startswith(f"{role}.")]
            heads = list(filter(self._tensors.has_part, all_heads))
            weight = torch.stack(list(map(self._tensors.numbers, heads)))
        weight = self._with_bias(weight + self.spec.norm_offset, table.get((f"{role}_bias", None)))
        if (order := head_deinterleave_order(spec)) is not None:
            weight = weight[..., order]
        return weight.to(self.device, self.precision.compute)

    # ------------------------------------------------------------------------------------- products

    def _linear(
        self,
        table: Table,
        roles: tuple[str, ...],
        expert: int | None = None,
        order: torch.Tensor | None = None,
    ) -> Linear:
        """Builds a linear layer over matrices stacked along their outputs.

        Args:
            table: parameters of the layer.
            roles: roles of the matrices, in order.
            expert: index of the expert, or None.
            order: permutation of the outputs, or None to keep the checkpoint's order.
        """
        parts = self._tensors.matrices([table[role, expert] for role in roles])
        bias = self._tensors.bias(table, roles, expert)
        if order is not None:
            parts = [stack_weights(parts, torch.float32)[order]]
            bias = None if bias is None else bias[order]
        return self.linears.build_linear(parts, bias)

    def _feed_forward(
        self, table: Table, prefix: str, spec: DenseSpec | ExpertsSpec, expert: int | None = None
    ) -> FeedForward:
        if not spec.size:
            return FeedForward(missing_linear, missing_linear, spec, self.precision.batch_invariant)
        roles = (f"{prefix}gate", f"{prefix}up") if spec.gated else (f"{prefix}up",)
        gate_up = self._linear(table, roles, expert)
        return FeedForward(
            gate_up,
            self._linear(table, (f"{prefix}down",), expert),
            spec,
            self.precision.batch_invariant,
            self._xielu_parameters(table) if spec.activation == "xielu" else None,
        )

    def _xielu_parameters(self, table: Table) -> torch.Tensor:
        values = [self._tensors.take_vector(table[role, None]).float() for role in XIELU_ROLES]
        return torch.cat([each.reshape(1) for each in values]).to(self.device)

    def _experts(self, table: Table, spec: ExpertsSpec, index: int) -> Experts | GpuExperts:
        found = table.get(("correction", None))
        gate = table.get(("shared_expert_gate", None))
        last = self._read_router(table)
        router = self._build_router_mlp(table, spec, last) if spec.router_size else last
        correction = (
            None if found is None else self._tensors.take_vector(found).float().to(self.device)
        )
        shared = self._feed_forward(table, "shared_", spec) if spec.shared_size else None
        shared_gate = (
            None
            if gate is None
            else self.linears.build_float32(self._tensors.take_parameter(gate), None)
        )
        local_ids = _local_expert_ids(spec, index, self._parallel, self._placement, self.device)
        scales = self._read_numbers(table, "expert_scales") if spec.expert_scales else None
        if self.fused:
            from sglang_lite.runtime.models.layers.gpu_experts import GpuExperts  # needs Triton

            matrices = self._expert_matrices(table, spec)
            return GpuExperts(
                spec, router, correction, matrices, shared, shared_gate, local_ids, scales=scales
            )
        experts = tuple(
            self._feed_forward(table, "expert_", spec, expert) for expert in spec.experts
        )
        return Experts(
            spec, router, correction, experts, shared, shared_gate, local_ids, scales=scales
        )

    def _build_router_mlp(self, table: Table, spec: ExpertsSpec, last: Linear) -> RouterMlp:
        linears = {
            name: self.linears.build_float32(
                self._tensors.take_parameter(table[role, None]),
                self._tensors.bias(table, (role,)),
            )
            for role, name in ROUTER_MATRICES.items()
        }
        return RouterMlp(
            **linears,
            carry=self._read_numbers(table, "router_carry") if spec.carries else None,
            norm=self._read_numbers(table, "router_inner_norm"),
            eps=self.spec.rms_eps,
            last=last,
        )

    def _read_router(self, table: Table) -> Linear:
        piece = self._tensors.find_stored_slice(table["router", None])
        # on the CPU, unless the weights have no values
        device = self.device if self.device.type == "meta" else None
        stored = self._tensors.take_parameter(table["router", None])
        weight = stack_weights([stored], torch.float32, device)
        if not weight.is_meta and not weight.isfinite().all():
            raise ModelError(
                f"{self.source.label}: {piece.name} has NaN or infinite elements, so it can't choose experts.",
                hint="Fetch the checkpoint again, or use another one.",
            )
        return self.linears.build_float32(weight, self._tensors.bias(table, ("router",)))

    def _expert_matrices(self, table: Table, spec: ExpertsSpec) -> ExpertMatrices:
        """Stacks the experts' matrices in the form that the GPU kernels take."""
        from sglang_lite.runtime.models.layers.expert_stacker import ExpertStacker  # needs Triton

        self._expert_stacker = self._expert_stacker or ExpertStacker(self.precision, self.device)
        gates_and_ups = ("expert_gate", "expert_up")
        experts = spec.experts
        return self._expert_stacker.build_matrices(
            [
                self._tensors.matrices([table[role, expert] for role in gates_and_ups])
                for expert in experts
            ],
            [self._tensors.matrices([table["expert_down", expert]]) for expert in experts],
            self._stack_expert_biases(table, gates_and_ups, spec),
            self._stack_expert_biases(table, ("expert_down",), spec),
            None if spec.own is None else spec.count,
        )

    def _stack_expert_biases(
        self, table: Table, roles: tuple[str, ...], spec: ExpertsSpec
    ) -> torch.Tensor | None:
        """Stacks the experts' biases [experts, outputs]. Returns None if they have none."""
        biases = [self._tensors.bias(table, roles, expert) for expert in spec.experts]
        given = [bias for bias in biases if bias is not None]
        return torch.stack(given).to(self.device, self.precision.weights) if given else None


def _build_and_free_stacks(tensors: ParameterTensors, make: Callable[[], T]) -> T:
    """Calls a function, and then frees the shared tensors from which it took parameters."""
    try:
        return make()
    finally:
        tensors.forget_stacks()


def _local_expert_ids(
    spec: ExpertsSpec,
    layer: int,
    parallel: Parallel,
    placement: ExpertPlacement | None,
    device: torch.device,
) -> torch.Tensor | None:
    """Maps each expert to its index among those that this rank holds, int32 [turns, count]. An
    expert held by another rank is mapped to the number of experts held here. Returns None if this
    rank holds all experts.
    """
    if spec.own is None:
        return None
    if placement is not None:
        turns = placement.local_ids(layer, spec.count, parallel)
        return torch.tensor(turns, dtype=torch.int32, device=device)
    numbers = torch.full((1, spec.count), len(spec.own), dtype=torch.int32)
    numbers[0, list(spec.own)] = torch.arange(len(spec.own), dtype=torch.int32)
    return numbers.to(device)
