"""Table of a model's parameters: the role and shape of each, and the slices of a checkpoint that
may hold it.

Used to read weights, and to shard, adapt or write them. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from sglang_lite.runtime.models.families import FAMILIES, Family
from sglang_lite.runtime.models.spec import (
    AttentionSpec,
    ConvSpec,
    DeltaSpec,
    DenseSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    LightningSpec,
    Mamba1Spec,
    Mamba2Spec,
    MixerSpec,
    MlstmSpec,
    ModelSpec,
    NoMixerSpec,
    RgLruSpec,
    ShortConvSpec,
    WkvSpec,
)


@dataclass(frozen=True, slots=True)
class CheckpointSlice:
    """Tensor of a checkpoint, or the slice of one, that holds a parameter.

    Attributes:
        name: name of the tensor.
        shape: shape of the whole tensor.
        part: index of the slice; empty for the whole tensor.
        outputs, inputs: axes of the whole tensor; a matrix of the model is (outputs, inputs).
            `inputs` is None for vectors.
        groups: number of equal groups along the first axis; `part` is taken from each group.
    """

    name: str
    shape: tuple[int, ...]
    part: tuple[int | slice, ...] = ()
    outputs: int = 0
    inputs: int | None = None
    groups: int = 1

    @property
    def is_transposed(self) -> bool:
        """True if the tensor has a matrix's inputs before its outputs."""
        return self.inputs is not None and self.outputs > self.inputs

    @property
    def outputs_first(self) -> CheckpointSlice:
        """Same slice of the same matrix, if its tensor had outputs before inputs."""
        if not self.is_transposed or len(self.shape) != 2:
            return self
        return replace(self, shape=self.shape[::-1], part=self.part[::-1], outputs=0, inputs=1)


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Tensor of the model.

    Attributes:
        role: role of the tensor in its layer or in the model, such as "q" or "embedding".
        shape: (outputs, inputs) of a matrix, (size,) of a vector.
        slices: tensors, or slices of them, of which a checkpoint has exactly one.
        layer: index of the tensor's layer, or None for a tensor of the whole model.
        expert: index of the tensor's expert, or None if the tensor belongs to no single expert.
    """

    role: str
    shape: tuple[int, ...]
    slices: tuple[CheckpointSlice, ...]
    layer: int | None = None
    expert: int | None = None


_MODEL_NAMES: Mapping[str, str] = {
    "embedding": "model.embed_tokens",
    "embedding_norm": "model.embed_norm",
    "embedding_shift": "model.input_hidden_states_bias",
    "embedding_factor": "model.input_hidden_states_scale",
    "position_table": "model.embed_positions",
    "layer_inputs": "model.embed_tokens_per_layer",
    "layer_inputs_projection": "model.per_layer_model_projection",
    "layer_inputs_norm": "model.per_layer_projection_norm",
    "layers": "model.layers",
    "message_queries": "model.message_input.query",
    "kv_message_queries": "model.message_input.kv_query",
    "last_query": "model.final_input.query",
    "norm": "model.norm",
    "head": "lm_head",
}
# Names of a layer's modules by role: Llama's, and those that only other families have.
_NAMES: Mapping[str, str] = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "sinks": "self_attn.sinks",
    "output_gating": "self_attn.gate_proj",
    "distance": "self_attn.r_proj",
    "distance_scale": "self_attn.relative_position_bias.norm.scale",
    "query_scale": "self_attn.q_proj.norm.scale",
    "token_sinks": "self_attn.sink_proj",
    "key_input_norm": "k_input_layernorm",
    "value_input_norm": "v_input_layernorm",
    "k_static": "self_attn.k_proj.sconv.static_weight",
    "v_static": "self_attn.v_proj.sconv.static_weight",
    "k_dynamic": "self_attn.k_proj.sconv.weight_proj.weight",
    "v_dynamic": "self_attn.v_proj.sconv.weight_proj.weight",
    "depth_queries": "attention_input.query",
    "feed_query": "mlp_input.query",
    **{
        f"{role}_message_{part}": f"{role}_message_gate.{name}_proj.weight"
        for role in ("q", "k", "v", "mlp")
        for part, name in (("down", "down"), ("forget", "forget_gate"), ("gain", "message_gate"))
    },
    "distance_bank": "self_attn.rel_logits_proj.proj",
    "k_taps": "self_attn.k_sconv.conv1d",
    "v_taps": "self_attn.v_sconv.conv1d",
    "attention_taps": "attn_sconv.conv1d",
    "mlp_taps": "mlp_sconv.conv1d",
    "mlp_factor": "mlp.global_scale",
    "router_factor": "mlp.gate.global_scale",
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
    "o": "self_attn.o_proj",
    "conv_b": "conv.in_proj",
    "conv_c": "conv.in_proj",
    "conv_x": "conv.in_proj",
    "conv_kernel": "conv.conv",
    "conv_out": "conv.out_proj",
    "delta_q": "linear_attn.in_proj_qkv",
    "delta_k": "linear_attn.in_proj_qkv",
    "delta_v": "linear_attn.in_proj_qkv",
    "delta_z": "linear_attn.in_proj_z",
    "delta_b": "linear_attn.in_proj_b",
    "delta_a": "linear_attn.in_proj_a",
    "delta_z_low": "self_attn.g_a_proj",
    "delta_z_high": "self_attn.g_b_proj",
    "delta_a_low": "self_attn.f_a_proj",
    "delta_a_high": "self_attn.f_b_proj",
    "delta_kernel_q": "linear_attn.conv1d",
    "delta_kernel_k": "linear_attn.conv1d",
    "delta_kernel_v": "linear_attn.conv1d",
    "delta_a_log": "linear_attn.A_log",
    "delta_dt": "linear_attn.dt_bias",
    "delta_norm": "linear_attn.norm",
    "delta_out": "linear_attn.out_proj",
    **dict.fromkeys(("lightning_q", "lightning_k", "lightning_v"), "self_attn.qkv_proj"),
    "lightning_z": "self_attn.output_gate",
    "lightning_norm": "self_attn.norm",
    "lightning_out": "self_attn.out_proj",
    **dict.fromkeys(
        ("mamba_z", "mamba_x", "mamba_b", "mamba_c", "mamba_dt"),
        "mamba.in_proj",
    ),
    **dict.fromkeys(("mamba_kernel_x", "mamba_kernel_b", "mamba_kernel_c"), "mamba.conv1d"),
    "mamba_a_log": "mamba.A_log",
    "mamba_dt_offset": "mamba.dt_bias",
    "mamba_d": "mamba.D",
    "mamba_norm": "mamba.norm",
    "mamba_low": "mamba.x_proj",
    "mamba_steps": "mamba.dt_proj",
    "mamba_low_norm": "mamba.dt_layernorm",
    "mamba_b_norm": "mamba.b_layernorm",
    "mamba_c_norm": "mamba.c_layernorm",
    "mamba_out": "mamba.out_proj",
    "lru_x": "temporal_block.linear_x",
    "lru_y": "temporal_block.linear_y",
    "lru_kernel": "temporal_block.conv_1d",
    "lru_enter": "temporal_block.rg_lru.input_gate_weight",
    "lru_enter_offset": "temporal_block.rg_lru.input_gate_bias",
    "lru_forget": "temporal_block.rg_lru.recurrent_gate_weight",
    "lru_forget_offset": "temporal_block.rg_lru.recurrent_gate_bias",
    "lru_decay": "temporal_block.rg_lru.recurrent_param",
    "lru_out": "temporal_block.linear_out",
    "wkv_k": "attention.key",
    "wkv_v": "attention.value",
    "wkv_r": "attention.receptance",
    "wkv_mix_k": "attention.time_mix_key[0,0]",
    "wkv_mix_v": "attention.time_mix_value[0,0]",
    "wkv_mix_r": "attention.time_mix_receptance[0,0]",
    "wkv_decay": "attention.time_decay",
    "wkv_first": "attention.time_first",
    "wkv_out": "attention.output",
    "channel_mix_k": "feed_forward.time_mix_key[0,0]",
    "channel_mix_r": "feed_forward.time_mix_receptance[0,0]",
    "channel_r": "feed_forward.receptance",
    **{f"mlstm_{role}": f"mlstm_layer.{role}" for role in ("q", "k", "v")},
    "mlstm_z": "mlstm_layer.ogate_preact",
    "mlstm_i": "mlstm_layer.igate_preact",
    "mlstm_f": "mlstm_layer.fgate_preact",
    "mlstm_norm": "mlstm_layer.multihead_norm",
    "mlstm_out": "mlstm_layer.out_proj",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
    "xielu_alpha_p": "mlp.act_fn.alpha_p",
    "xielu_alpha_n": "mlp.act_fn.alpha_n",
    "xielu_beta": "mlp.act_fn.beta",
    "xielu_eps": "mlp.act_fn.eps",
    "mlp_out_norm": "post_feedforward_layernorm",
    "experts_norm": "pre_feedforward_layernorm_2",
    "shared_out_norm": "post_feedforward_layernorm_1",
    "experts_out_norm": "post_feedforward_layernorm_2",
    "router_scale": "router.scale",
    "expert_scales": "router.per_expert_scale",
    "layer_scale": "layer_scalar",
    "inputs_first": "per_layer_input_gate",
    "inputs_output": "per_layer_projection",
    "inputs_norm": "post_per_layer_input_norm",
    "block_output": "linear",
    "first_taps": "self_attn.qkv_proj.conv_qk_depthwise",
    "second_taps": "self_attn.qkv_proj.conv_qk_grouped",
    "key_factor": "self_attn.qk_norm.temp",
    "v_before": "self_attn.qkv_proj.v_proj_delayed",
    "router_inner": "mlp.gate.down_proj",
    "router_carry": "mlp.gate.router_states_scale",
    "router_inner_norm": "mlp.gate.router_mlp.norm",
    "router_first": "mlp.gate.router_mlp.fc1",
    "router_second": "mlp.gate.router_mlp.fc2",
    **{
        f"{block}_{part}_{kind}": f"post_{block}_residual_scale.{stored}_{name}"
        for block in ("attention", "mlp")
        for part, stored in (("output", "hidden_states"), ("residual", "residual"))
        for kind, name in (("shift", "bias"), ("factor", "scale"))
    },
    "router": "mlp.gate",
    "correction": "mlp.gate.e_score_correction_bias",
    "expert_gate": "mlp.experts.{}.gate_proj",
    "expert_up": "mlp.experts.{}.up_proj",
    "expert_down": "mlp.experts.{}.down_proj",
    "stacked_gate_up": "mlp.experts.gate_up_proj",
    "stacked_down": "mlp.experts.down_proj",
    "always_gate": "mlp.shared_experts.gate_proj",
    "always_up": "mlp.shared_experts.up_proj",
    "always_down": "mlp.shared_experts.down_proj",
    "shared_gate": "mlp.shared_expert.gate_proj",
    "shared_up": "mlp.shared_expert.up_proj",
    "shared_down": "mlp.shared_expert.down_proj",
    "shared_expert_gate": "mlp.shared_expert_gate",
}


DELTA_KERNELS = ("delta_kernel_q", "delta_kernel_k", "delta_kernel_v")
MAMBA1_NORMS = ("mamba_low_norm", "mamba_b_norm", "mamba_c_norm")
MAMBA2_KERNELS = ("mamba_kernel_x", "mamba_kernel_b", "mamba_kernel_c")
WKV_MIXES = ("wkv_mix_k", "wkv_mix_v", "wkv_mix_r")
CHANNEL_MIXES = ("channel_mix_k", "channel_mix_r")
_MIDDLE = "[0,0,:,0]"  # ends the name of a vector that is stored [1, 1, size, 1]
_LAST = "[0,0]"  # ends the name of a vector that is stored [1, 1, size]
# attribute of a layer -> roles of the vectors that change a block's output and the residual
RESIDUAL_WEIGHTS = {
    f"{block}_sum": tuple(
        f"{block}_{part}_{kind}" for part in ("output", "residual") for kind in ("shift", "factor")
    )
    for block in ("attention", "mlp")
}
EMBEDDING_WEIGHTS = ("embedding_shift", "embedding_factor")
SHORT_CONVS = ("k_taps", "v_taps", "attention_taps", "mlp_taps")
DYNAMIC_CONVS = ("k_static", "v_static", *SHORT_CONVS[2:])
MESSAGE_READERS = ("q", "k", "v", "mlp")  # prefixes of roles, in order
# for each layer: those of queries and the feed-forward; those of keys and values
MESSAGE_QUERIES = ("message_queries", "kv_message_queries")
MESSAGE_MATRICES = ("down", "forget", "gain")
DEPTH_QUERIES = ("depth_queries", "feed_query")
OUTPUT_FACTORS = ("mlp_factor", "router_factor")  # of a dense feed-forward, or of experts
ROUTER_MATRICES = {"router_inner": "inner", "router_first": "first", "router_second": "second"}
# roles of low-rank additions to a block's first projections -> parts of each projection
ATTENTION_ADDITION = (("q_first", "second_q"), ("k_first", "second_k"), ("v_first", "second_v"))
FEED_FORWARD_ADDITION = (("fed_first", "second_gate", "second_up"),)
XIELU_ROLES = ("xielu_alpha_p", "xielu_alpha_n", "xielu_beta", "xielu_eps")


def parameters(spec: ModelSpec) -> Iterator[ParameterSpec]:
    """Yields all parameters of a model, layer by layer."""
    table = (spec.vocab_size, spec.hidden_size)
    names = {**_MODEL_NAMES, **FAMILIES[spec.architecture].names}
    yield ParameterSpec(
        "embedding", table, (CheckpointSlice(f"{names['embedding']}.weight", table, inputs=1),)
    )
    if spec.learned_positions:
        rows = (spec.learned_positions + spec.position_offset, spec.hidden_size)
        piece = CheckpointSlice(f"{names['position_table']}.weight", rows, inputs=1)
        yield ParameterSpec("position_table", rows, (piece,))
    if spec.embedding_norm:
        yield from _model_norm("embedding_norm", names, spec)
    for role in EMBEDDING_WEIGHTS if spec.embedding_weights else ():
        size = (spec.hidden_size,)
        yield ParameterSpec(role, size, (CheckpointSlice(names[role], size),))
    if spec.layer_input_tokens:
        yield from _layer_inputs(names, spec)
    for i in range(len(spec.layers)):
        yield from layer_parameters(spec, i)
    for role in MESSAGE_QUERIES if spec.looped_layers else ():
        rows = (2 * spec.looped_layers, spec.hidden_size)
        yield ParameterSpec(role, rows, (CheckpointSlice(names[role], rows),))
    if spec.blocks:
        yield ParameterSpec(
            "last_query", table[1:], (CheckpointSlice(names["last_query"], table[1:]),)
        )
    yield from _model_norm("norm", names, spec)
    if not spec.tied_embeddings:
        yield ParameterSpec(
            "head", table, (CheckpointSlice(f"{names['head']}.weight", table, inputs=1),)
        )
    if spec.head_bias:
        yield ParameterSpec(
            "head_bias", table[:1], (CheckpointSlice(f"{names['head']}.bias", table[:1]),)
        )


def _layer_inputs(names: Mapping[str, str], spec: ModelSpec) -> Iterator[ParameterSpec]:
    """Yields the parameters that the inputs of all layers are computed from."""
    size = spec.layer_input_size
    for role, shape in (
        ("layer_inputs", (spec.layer_input_tokens, size)),
        ("layer_inputs_projection", (size, spec.hidden_size)),
    ):
        yield ParameterSpec(
            role, shape, (CheckpointSlice(f"{names[role]}.weight", shape, inputs=1),)
        )
    of_layer = (spec.layers[0].input_size,)
    name = f"{names['layer_inputs_norm']}.weight"
    yield ParameterSpec("layer_inputs_norm", of_layer, (CheckpointSlice(name, of_layer),))


def _model_norm(role: str, names: Mapping[str, str], spec: ModelSpec) -> Iterator[ParameterSpec]:
    """Yields the weight and the bias, if any, of a norm outside the layers."""
    size = (spec.hidden_size,)
    if spec.norm_weight:
        yield ParameterSpec(role, size, (CheckpointSlice(f"{names[role]}.weight", size),))
    if spec.norm_bias:
        yield ParameterSpec(f"{role}_bias", size, (CheckpointSlice(f"{names[role]}.bias", size),))


def tensor_names(spec: ModelSpec) -> set[str]:
    """Returns the names of all tensors that a checkpoint of a model may have."""
    return {piece.name for parameter in parameters(spec) for piece in parameter.slices}


def head_name(spec: ModelSpec) -> str:
    """Returns the name of the module that computes logits."""
    return {**_MODEL_NAMES, **FAMILIES[spec.architecture].names}["head"]


def layer_parameters(spec: ModelSpec, index: int) -> Iterator[ParameterSpec]:
    """Yields the parameters of a layer. The role of a bias is its matrix's role with the suffix
    `_bias`.
    """
    layer = spec.layers[index]
    if layer.repeats is not None:
        return
    family = FAMILIES[spec.architecture]
    more = None if layer.block is None else family.block_names
    names = _Names(family, index, layer.stored_as, more)
    inputs = layer.attention_inputs(spec.hidden_size)
    if layer.block is not None:
        yield from _own_block_parameters(names, spec, index)
    if index in spec.borrowed_blocks:
        return
    for role in layer.hidden_norms if spec.norm_weight else ():
        size = inputs if role == "input_norm" else spec.hidden_size
        yield from names.norm(role, (size,), bias=spec.norm_bias)
    if layer.scaled:
        yield names.vector("layer_scale", 1, suffix="")
    for role in chain(*RESIDUAL_WEIGHTS.values()) if layer.residual_weights else ():
        yield names.vector(role, spec.hidden_size, suffix="")
    if layer.input_size:
        yield from names.matrices({"inputs_first": layer.input_size}, spec.hidden_size, bias=False)
        yield from names.matrices({"inputs_output": spec.hidden_size}, layer.input_size, bias=False)
    for mixer in layer.mixers if layer.block is None else (layer.attention,):
        yield from _mixer_parameters(names, mixer, spec.hidden_size, inputs)
    if layer.depth is not None:
        for role, count in zip(DEPTH_QUERIES, (layer.depth.queries, 1)):
            shape = (spec.hidden_size,) if count == 1 else (count, spec.hidden_size)
            if count:
                yield names.depth_query(role, shape)
        if layer.depth.gate_rank:
            yield from _message_parameters(names, spec.hidden_size, layer.depth.gate_rank)
    feed_forward = layer.feed_forward
    if (factor := output_factor_role(layer)) is not None:
        yield names.vector(factor, 1, suffix="")
    if not layer.feeds:
        return
    if isinstance(feed_forward, DenseSpec):
        made = names.gated_mlp if feed_forward.gated else names.plain_mlp
        yield from made("", feed_forward.size, spec.hidden_size, bias=feed_forward.bias)
        if feed_forward.activation == "xielu":
            for role in XIELU_ROLES:
                yield names.array(role, (1,) if "alpha" in role else ())
        if feed_forward.mixed:
            yield from (names.vector(role, spec.hidden_size, suffix="") for role in CHANNEL_MIXES)
            yield from names.matrices({"channel_r": spec.hidden_size}, spec.hidden_size, bias=False)
    else:
        yield from _expert_parameters(names, feed_forward, spec.hidden_size)


def _message_parameters(names: _Names, hidden: int, rank: int) -> Iterator[ParameterSpec]:
    """Yields the parameters of a layer's message gates."""
    for role in MESSAGE_READERS:
        yield names.matrix(f"{role}_message_down", (rank, 2 * hidden))
        yield names.matrix(f"{role}_message_forget", (hidden, rank))
        yield names.matrix(f"{role}_message_gain", (hidden, rank))


def output_factor_role(layer: LayerSpec) -> str | None:
    """Returns the role of the learnt number that multiplies the output of the feed-forward, or None
    if the layer has none.
    """
    if not isinstance(layer.attention, AttentionSpec):
        return None
    if (convs := layer.attention.short_convs) is None or not convs.learns_factor:
        return None
    return OUTPUT_FACTORS[isinstance(layer.feed_forward, ExpertsSpec)]


def _own_block_parameters(names: _Names, spec: ModelSpec, index: int) -> Iterator[ParameterSpec]:
    """Yields the parameters that a layer with a block shares with no other layer."""
    layer = spec.layers[index]
    block = layer.block
    a = layer.attention
    assert block is not None
    assert layer.beside is not None
    assert isinstance(a, AttentionSpec)
    hidden = spec.hidden_size
    yield from names.norm("beside_norm", (hidden,), bias=False)
    yield from _mixer_parameters(names, layer.beside, hidden, hidden)
    yield from names.matrices({"block_output": hidden}, hidden, bias=False)
    family = FAMILIES[spec.architecture]
    number = sum(each.block is not None for each in spec.layers[:index])
    added = {role: name.format(number) for role, name in family.addition_names.items()}
    names = _Names(family, index, block.weights_of, added)
    outputs = (a.heads * a.key_size, a.projected_keys, a.projected_values)
    if rank := block.attention_rank:
        for (first, second), size in zip(ATTENTION_ADDITION, outputs):
            yield from names.matrices({first: rank}, 2 * hidden, bias=False)
            yield from names.matrices({second: size}, rank, bias=False)
    if rank := block.feed_forward_rank:
        for first, *seconds in FEED_FORWARD_ADDITION:
            yield from names.matrices({first: rank}, hidden, bias=False)
            sizes = dict.fromkeys(seconds, layer.feed_forward.size)
            yield from names.matrices(sizes, rank, bias=False)


def _mixer_parameters(
    names: _Names, a: MixerSpec, hidden: int, inputs: int
) -> Iterator[ParameterSpec]:
    """Yields the parameters of a mixer. `inputs` is the size of attention's input."""
    if isinstance(a, ConvSpec):
        yield from _conv_parameters(names, a, hidden)
    elif isinstance(a, DeltaSpec):
        yield from _delta_parameters(names, a, hidden)
    elif isinstance(a, LightningSpec):
        yield from _lightning_parameters(names, a, hidden)
    elif isinstance(a, Mamba2Spec):
        yield from _mamba2_parameters(names, a, hidden)
    elif isinstance(a, Mamba1Spec):
        yield from _mamba1_parameters(names, a, hidden)
    elif isinstance(a, RgLruSpec):
        yield from _rg_lru_parameters(names, a, hidden)
    elif isinstance(a, WkvSpec):
        yield from _wkv_parameters(names, a, hidden)
    elif isinstance(a, MlstmSpec):
        yield from _mlstm_parameters(names, a, hidden)
    elif not isinstance(a, NoMixerSpec):
        yield from (
            _latent_parameters(names, a, hidden)
            if isinstance(a, LatentSpec)
            else _head_parameters(names, a, inputs)
        )
        yield from names.matrices({"o": hidden}, a.heads * a.value_size, bias=a.output_bias)


def _head_parameters(names: _Names, a: AttentionSpec, hidden: int) -> Iterator[ParameterSpec]:
    every = {"q": a.heads * a.key_size, "k": a.projected_keys, "v": a.projected_values}
    if a.taps is not None:
        yield from _convolved_head_parameters(names, a, a.taps)
        every |= dict.fromkeys(("v", "v_before"), a.projected_values // 2)
    sizes = {role: size for role, size in every.items() if size}
    gate = {"output_gating": a.heads * a.gate_size} if a.output_gate else {}
    if gate and names.shares_tensor("q", "output_gating"):
        # each head's query, and then its gate
        queries = {"q": sizes["q"], **gate}
        yield from names.grouped_matrices(queries, hidden, a.heads, bias=a.qkv_bias)
        others = {role: size for role, size in sizes.items() if role != "q"}
        yield from names.matrices(others, hidden, bias=a.qkv_bias)
        gate = {}
    else:
        yield from names.heads(sizes, hidden, a, bias=a.qkv_bias)
    for role, heads in (
        (("q", a.heads), ("k", a.kv_heads)) if a.qk_norm and a.qk_norm_weight else ()
    ):
        if role not in sizes:
            continue
        shapes = {"head": (a.key_size,), "heads": (heads, a.key_size), "whole": (sizes[role],)}
        yield from names.norm(f"{role}_norm", shapes[a.qk_norm], bias=a.qk_norm_bias)
    yield from names.matrices(gate, hidden, bias=False)
    if a.distance_bias is not None:
        yield from names.matrices({"distance": a.bias_projection}, hidden, bias=False)
        yield names.array("distance_bank", (a.distance_bias.rank, a.distance_bias.extent))
        if a.distance_bias.clip is not None:
            yield names.array("distance_scale", (a.heads, a.distance_bias.rank))
    if a.norm_limit is not None:
        yield names.array("query_scale", (a.heads, a.key_size))
    if a.token_sinks:
        yield from names.matrices({"token_sinks": a.heads}, hidden, bias=False)
    if a.short_convs is not None:
        channels = a.projected_keys, a.projected_values, *[a.short_convs.hidden] * 2
        taps = a.short_convs.taps
        for role, size in zip(short_conv_roles(a.short_convs), channels):
            if role in ("k_static", "v_static"):
                yield names.array(role, (taps, size))
            else:
                yield from names.channel_kernels({role: size}, taps, bias=False)
        for role in ("k_dynamic", "v_dynamic") if a.short_convs.dynamic else ():
            yield names.matrix(role, (a.kv_heads * taps, hidden))
    if a.sinks:
        yield names.vector("sinks", a.heads, suffix="")


def _convolved_head_parameters(
    names: _Names, a: AttentionSpec, taps: tuple[int, int]
) -> Iterator[ParameterSpec]:
    """Yields the parameters of attention's convolutions."""
    channels = (a.heads + a.kv_heads) * a.key_size
    yield from names.channel_kernels({"first_taps": channels}, taps[0], bias=True)
    yield names.array("second_taps", (channels, a.key_size, taps[1]), suffix=".weight")
    yield names.array("second_taps_bias", (channels,), suffix=".bias")
    yield names.vector("key_factor", a.kv_heads, suffix="")


def _latent_parameters(names: _Names, a: LatentSpec, hidden: int) -> Iterator[ParameterSpec]:
    queries = a.heads * a.query_size
    if a.query_rank is None:
        yield from names.matrices({"q": queries}, hidden, bias=False)
    else:
        yield from names.matrices({"q_a": a.query_rank}, hidden, bias=a.bias)
        yield names.vector("q_a_norm", a.query_rank)
        yield from names.matrices({"q_b": queries}, a.query_rank, bias=False)
    yield from names.matrices({"kv_a": a.key_size}, hidden, bias=a.bias)
    if a.output_gate:
        yield from names.matrices({"output_gating": a.gate_size}, hidden, bias=False)
    yield names.vector("kv_a_norm", a.rank)
    yield from names.matrices({"kv_b": a.heads * (a.nope_size + a.value_size)}, a.rank, bias=False)


def _conv_parameters(names: _Names, conv: ConvSpec, hidden: int) -> Iterator[ParameterSpec]:
    inputs = dict.fromkeys(("conv_b", "conv_c", "conv_x"), conv.size)
    yield from names.matrices(inputs, hidden, bias=conv.bias)
    yield from names.conv_kernel(conv)
    yield from names.matrices({"conv_out": hidden}, conv.size, bias=conv.bias)


def _delta_parameters(names: _Names, delta: DeltaSpec, hidden: int) -> Iterator[ParameterSpec]:
    keys = delta.key_heads * delta.key_size
    heads = delta.value_heads
    values = heads * delta.value_size
    channels = (keys, keys, values)
    first = dict(zip(input_projection_roles(delta), (*channels, *delta.gate_sizes)))
    rates_apart = not names.shares_tensor("delta_q", "delta_b")
    if names.shares_tensor("delta_q", "delta_z") and rates_apart:
        # rows are grouped by key head
        rates = {role: first.pop(role) for role in ("delta_b", "delta_a")}
        for group in (first, rates):
            yield from names.grouped_matrices(group, hidden, delta.key_heads, bias=False)
    else:
        yield from names.matrices(first, hidden, bias=False)
    if delta.gate_rank:
        high = {"delta_z_high": values, "delta_a_high": heads * delta.decays}
        yield from names.matrices(high, delta.gate_rank, bias=False)
    kernels = dict(zip(DELTA_KERNELS, channels))
    yield from names.channel_kernels(kernels, delta.taps, bias=False)
    yield names.vector("delta_a_log", heads, suffix="")
    yield names.vector("delta_dt", heads * delta.decays, suffix="")
    yield names.vector("delta_norm", delta.value_size)
    yield from names.matrices({"delta_out": hidden}, values, bias=False)


def _lightning_parameters(
    names: _Names, lightning: LightningSpec, hidden: int
) -> Iterator[ParameterSpec]:
    first = dict.fromkeys(input_projection_roles(lightning), lightning.inner_size)
    gate = {"lightning_z": first.pop("lightning_z")}
    yield from names.grouped_matrices(first, hidden, lightning.heads, bias=False)
    yield from names.matrices(gate, hidden, bias=False)
    yield names.vector("lightning_norm", lightning.inner_size)
    yield from names.matrices({"lightning_out": hidden}, lightning.inner_size, bias=False)


def _mamba2_parameters(names: _Names, mamba: Mamba2Spec, hidden: int) -> Iterator[ParameterSpec]:
    roles = input_projection_roles(mamba)
    yield from names.matrices(dict(zip(roles, mamba.projections)), hidden, bias=mamba.bias)
    kernels = dict(zip(MAMBA2_KERNELS, mamba.projections[1:]))
    yield from names.channel_kernels(kernels, mamba.taps, bias=mamba.conv_bias)
    for role in ("mamba_a_log", "mamba_dt_offset", "mamba_d"):
        yield names.vector(role, mamba.heads, suffix="")
    if mamba.norm:
        yield names.vector("mamba_norm", mamba.inner_size)
    yield from names.matrices({"mamba_out": hidden}, mamba.inner_size, bias=mamba.output_bias)


def _mamba1_parameters(names: _Names, mamba: Mamba1Spec, hidden: int) -> Iterator[ParameterSpec]:
    inputs = dict.fromkeys(input_projection_roles(mamba), mamba.size)
    yield from names.channel_kernels(
        {"mamba_kernel_x": mamba.size}, mamba.taps, bias=mamba.conv_bias
    )
    if mamba.groups > 1:
        yield from names.grouped_matrices(inputs, hidden, mamba.size, bias=mamba.bias)
        yield from _grouped_mamba1_parameters(names, mamba)
    else:
        yield from names.matrices(inputs, hidden, bias=mamba.bias)
        yield from names.matrices({"mamba_low": sum(mamba.low_sizes)}, mamba.size, bias=False)
        yield from names.matrices({"mamba_steps": mamba.size}, mamba.rank, bias=False)
        yield names.array("mamba_a_log", (mamba.size, mamba.state_size))
        for role in ("mamba_dt_offset", "mamba_d"):
            yield names.vector(role, mamba.size, suffix="")
    for role, size in zip(mamba1_norms(mamba), mamba.low_sizes):
        yield names.vector(role, size)
    yield from names.matrices({"mamba_out": hidden}, mamba.size, bias=mamba.bias)


def _grouped_mamba1_parameters(names: _Names, mamba: Mamba1Spec) -> Iterator[ParameterSpec]:
    """Yields the parameters of each group of channels. The role ends with the group's number."""
    size = mamba.size // mamba.groups
    for role, shape in (
        ("mamba_low", (sum(mamba.low_sizes), size)),
        ("mamba_steps", (size, mamba.rank)),
        ("mamba_a_log", (size, mamba.state_size)),
        ("mamba_dt_offset", (size,)),
        ("mamba_d", (size,)),
    ):
        for group in range(mamba.groups):
            yield names.stack_item(role, group, mamba.groups, shape)


def mamba1_norms(mamba: Mamba1Spec) -> tuple[str, ...]:
    """Returns the roles of the weights of the norms of low, b and c."""
    return MAMBA1_NORMS if mamba.norm_eps is not None and mamba.norm_weight else ()


def _rg_lru_parameters(names: _Names, lru: RgLruSpec, hidden: int) -> Iterator[ParameterSpec]:
    inputs = dict.fromkeys(input_projection_roles(lru), lru.size)
    yield from names.matrices(inputs, hidden, bias=True)
    yield from names.channel_kernels({"lru_kernel": lru.size}, lru.taps, bias=True)
    block = (lru.heads, lru.value_size)
    for role in ("lru_enter", "lru_forget"):
        yield names.array(role, (*block, lru.value_size))
        yield names.array(f"{role}_offset", block)
    yield names.vector("lru_decay", lru.size, suffix="")
    yield from names.matrices({"lru_out": hidden}, lru.size, bias=True)


def _wkv_parameters(names: _Names, wkv: WkvSpec, hidden: int) -> Iterator[ParameterSpec]:
    for role in WKV_MIXES:
        yield names.vector(role, hidden, suffix="")
    yield from names.matrices(
        dict.fromkeys(("wkv_k", "wkv_v", "wkv_r"), wkv.size), hidden, bias=False
    )
    for role in ("wkv_decay", "wkv_first"):
        yield names.vector(role, wkv.size, suffix="")
    yield from names.matrices({"wkv_out": hidden}, wkv.size, bias=False)


def _mlstm_parameters(names: _Names, a: MlstmSpec, hidden: int) -> Iterator[ParameterSpec]:
    for role, size in zip(input_projection_roles(a), a.projections):
        yield from names.matrices({role: size}, hidden, bias=role in ("mlstm_i", "mlstm_f"))
    yield names.vector("mlstm_norm", a.heads * a.value_size)
    yield from names.matrices({"mlstm_out": hidden}, a.heads * a.value_size, bias=False)


def short_conv_roles(spec: ShortConvSpec) -> tuple[str, ...]:
    """Returns the roles of the kernels of a layer's short convolutions, in order."""
    return DYNAMIC_CONVS if spec.dynamic else SHORT_CONVS


def separate_projection_roles(spec: MixerSpec) -> dict[str, tuple[str, ...]]:
    """Maps the attributes of `Layer` for keys and values to the roles of the matrices stacked in
    them. Returns {} if these matrices are in attention's first linear layer.
    """
    if not isinstance(spec, AttentionSpec) or not spec.separate:
        return {}
    dynamic = spec.short_convs is not None and spec.short_convs.dynamic
    return {
        "keys": ("k", "k_dynamic") if dynamic else ("k",),
        "values": ("v", "v_dynamic") if dynamic else ("v",),
    }


def input_projection_roles(spec: MixerSpec) -> tuple[str, ...]:
    """Returns the roles of the matrices stacked in attention's first linear layer, in order."""
    if isinstance(spec, AttentionSpec):
        own = ("k",) if spec.projected_keys and not spec.separate else ()
        values = ("v",) if spec.projected_values and not spec.separate else ()
        before = () if spec.taps is None else ("v_before",)
        gate = ("output_gating",) if spec.output_gate else ()
        bias = () if spec.distance_bias is None else ("distance",)
        sinks = ("token_sinks",) if spec.token_sinks else ()
        return "q", *own, *values, *before, *gate, *bias, *sinks
    if isinstance(spec, ConvSpec):
        return "conv_b", "conv_c", "conv_x"
    if isinstance(spec, DeltaSpec):
        low = "_low" if spec.gate_rank else ""
        return "delta_q", "delta_k", "delta_v", f"delta_z{low}", "delta_b", f"delta_a{low}"
    if isinstance(spec, LightningSpec):
        return "lightning_q", "lightning_k", "lightning_v", "lightning_z"
    if isinstance(spec, Mamba2Spec):
        return "mamba_z", "mamba_x", "mamba_b", "mamba_c", "mamba_dt"
    if isinstance(spec, Mamba1Spec):
        return "mamba_x", "mamba_z"
    if isinstance(spec, RgLruSpec):
        return "lru_x", "lru_y"
    if isinstance(spec, MlstmSpec):
        return "mlstm_q", "mlstm_k", "mlstm_v", "mlstm_z", "mlstm_i", "mlstm_f"
    if isinstance(spec, NoMixerSpec | WkvSpec):  # time mixing has an input for each matrix
        return ()
    gate = ("output_gating",) if spec.output_gate else ()
    return "q" if spec.query_rank is None else "q_a", "kv_a", *gate


def output_projection_role(spec: MixerSpec) -> str:
    """Returns the role of the output projection of attention, or of the mixer in its place."""
    if isinstance(spec, DeltaSpec):
        return "delta_out"
    if isinstance(spec, LightningSpec):
        return "lightning_out"
    if isinstance(spec, Mamba2Spec | Mamba1Spec):
        return "mamba_out"
    if isinstance(spec, RgLruSpec):
        return "lru_out"
    if isinstance(spec, WkvSpec):
        return "wkv_out"
    if isinstance(spec, MlstmSpec):
        return "mlstm_out"
    return "conv_out" if isinstance(spec, ConvSpec) else "o"


def _expert_parameters(names: _Names, experts: ExpertsSpec, hidden: int) -> Iterator[ParameterSpec]:
    size = experts.router_size
    yield from names.matrices({"router": experts.classes}, size or hidden, bias=experts.router_bias)
    if size:
        yield from names.norm("router_inner_norm", (size,), bias=False)
        for role in ROUTER_MATRICES:
            inputs = hidden if role == "router_inner" else size
            yield from names.matrices({role: size}, inputs, bias=True)
    if experts.carries:
        yield names.vector("router_carry", size, suffix="")
    if experts.correction:
        yield names.vector("correction", experts.classes - experts.always, suffix="")
    if experts.apart:
        yield names.vector("router_scale", hidden, suffix="")
    if experts.expert_scales:
        yield names.vector("expert_scales", experts.count, suffix="")
    for expert in range(experts.count):
        yield from names.expert(expert, experts, hidden)
    if experts.shared_size:
        made = names.gated_mlp if experts.gated else names.plain_mlp
        yield from made("shared_", experts.shared_size, hidden, bias=False)
    if experts.shared_gate:
        yield from names.matrices({"shared_expert_gate": 1}, hidden, bias=False)


class _Names:
    """Factory of one layer's parameters: maps roles to the tensor names of the family.

    Args:
        family: the family.
        layer: index of the layer.
        stored_in: index of the layer that has the tensors in a checkpoint; None for `layer`.
        more: further names by role.
    """

    def __init__(
        self,
        family: Family,
        layer: int,
        stored_in: int | None = None,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self._family = family
        self._layer = layer
        self._stored_in = layer if stored_in is None else stored_in
        self._names = {**_MODEL_NAMES, **_NAMES, **family.names, **(more or {})}

    def _path(self, role: str) -> str:
        return self._path_to(self._names[role])

    def _path_to(self, name: str) -> str:
        return f"{self._names['layers']}.{self._stored_in}.{name}"

    def vector(self, role: str, size: int, suffix: str = ".weight") -> ParameterSpec:
        path = self._path(role)
        if path.endswith(_MIDDLE):
            name = path.removesuffix(_MIDDLE) + suffix
            piece = CheckpointSlice(name, (1, 1, size, 1), (0, 0, slice(None), 0))
            return ParameterSpec(role, (size,), (piece,), self._layer)
        if path.endswith(_LAST):
            name = path.removesuffix(_LAST) + suffix
            piece = CheckpointSlice(name, (1, 1, size), (0, 0, slice(None)))
            return ParameterSpec(role, (size,), (piece,), self._layer)
        name = path.removesuffix("[0]")
        piece = (
            CheckpointSlice(name + suffix, (size,))
            if name == path
            else CheckpointSlice(name + suffix, (1, size), (0, slice(None)))
        )
        return ParameterSpec(role, (size,), (piece,), self._layer)

    def array(self, role: str, shape: tuple[int, ...], suffix: str = "") -> ParameterSpec:
        piece = CheckpointSlice(self._path(role.removesuffix("_bias")) + suffix, shape)
        return ParameterSpec(role, shape, (piece,), self._layer)

    def matrix(self, role: str, shape: tuple[int, int]) -> ParameterSpec:
        """Returns a matrix whose name has no suffix."""
        piece = CheckpointSlice(self._path(role), shape, inputs=1)
        return ParameterSpec(role, shape, (piece,), self._layer)

    def depth_query(self, role: str, shape: tuple[int, ...]) -> ParameterSpec:
        """Returns the queries with which an input reads earlier blocks. Some families store them
        outside the layers, with numbers; those of attention start at the second layer.
        """
        name = self._names[role]
        number = self._stored_in - (role == "depth_queries")
        path = name.format(number) if "{}" in name else self._path(role)
        return ParameterSpec(role, shape, (CheckpointSlice(path, shape),), self._layer)

    def stack_item(
        self, role: str, index: int, count: int, shape: tuple[int, ...]
    ) -> ParameterSpec:
        """Returns a matrix or vector that is one of `count` in a tensor."""
        inputs = 2 if len(shape) > 1 else None
        whole = (count, *shape)
        part: tuple[int | slice, ...] = (index, *(slice(None) for _ in shape))
        piece = CheckpointSlice(self._path(role), whole, part, outputs=1, inputs=inputs)
        return ParameterSpec(f"{role}.{index}", shape, (piece,), self._layer)

    def norm(self, role: str, shape: tuple[int, ...], *, bias: bool) -> Iterator[ParameterSpec]:
        """Yields the weight of a norm, and its bias if `bias` is set. If the family stores a
        separate tensor for each head, yields one weight per head.
        """
        path = self._path(role)
        names = [self._path_to(name) for name in self._names[role].split("|")]
        if "{}" in path:
            for head in range(shape[0]):
                piece = CheckpointSlice(f"{path.format(head)}.weight", shape[1:])
                yield ParameterSpec(f"{role}.{head}", shape[1:], (piece,), self._layer)
            return
        for kind, its_role in (("weight", role), *((("bias", f"{role}_bias"),) if bias else ())):
            pieces = tuple(CheckpointSlice(f"{name}.{kind}", shape) for name in names)
            yield ParameterSpec(its_role, shape, pieces, self._layer)

    def conv_kernel(self, conv: ConvSpec) -> Iterator[ParameterSpec]:
        """Yields the kernel of a convolution, which is stored [channels, 1, window]."""
        path = self._path("conv_kernel")
        shape = (conv.size, conv.window)
        stored = CheckpointSlice(f"{path}.weight", (conv.size, 1, conv.window), (slice(None), 0))
        yield ParameterSpec("conv_kernel", shape, (stored,), self._layer)
        if conv.bias:
            bias = CheckpointSlice(f"{path}.bias", shape[:1])
            yield ParameterSpec("conv_kernel_bias", shape[:1], (bias,), self._layer)

    def channel_kernels(
        self, channels: Mapping[str, int], taps: int, *, bias: bool
    ) -> Iterator[ParameterSpec]:
        """Yields the kernels of a convolution, one for each role of its channels, and their biases
        if `bias` is set. Kernels are stored as [channels, 1, taps]. If all roles have the same
        tensor name, the kernels are consecutive channels of that tensor.
        """
        whole = len({self._path(role) for role in channels}) == 1
        end = 0
        for role, size in channels.items():
            start, end = (end, end + size) if whole else (0, size)
            rows = sum(channels.values()) if whole else size
            part = slice(start, end)
            piece = CheckpointSlice(f"{self._path(role)}.weight", (rows, 1, taps), (part, 0))
            yield ParameterSpec(role, (size, taps), (piece,), self._layer)
            if bias:
                piece = CheckpointSlice(f"{self._path(role)}.bias", (rows,), (part,))
                yield ParameterSpec(f"{role}_bias", (size,), (piece,), self._layer)

    def shares_tensor(self, role: str, other: str) -> bool:
        """Returns whether two matrices are parts of one tensor."""
        return self._path(role) == self._path(other)

    def plain_mlp(
        self, prefix: str, size: int, hidden: int, *, bias: bool
    ) -> Iterator[ParameterSpec]:
        yield from self.matrices({f"{prefix}up": size}, hidden, bias=bias)
        yield from self.matrices({f"{prefix}down": hidden}, size, bias=bias)

    def gated_mlp(
        self, prefix: str, size: int, hidden: int, *, bias: bool
    ) -> Iterator[ParameterSpec]:
        yield from self.matrices({f"{prefix}gate": size, f"{prefix}up": size}, hidden, bias=bias)
        yield from self.matrices({f"{prefix}down": hidden}, size, bias=bias)

    def heads(
        self, outputs: Mapping[str, int], inputs: int, spec: AttentionSpec, *, bias: bool
    ) -> Iterator[ParameterSpec]:
        """Yields the query, key and value matrices, which are slices of one matrix if the family
        groups them by key-value head.
        """
        if not self._family.qkv_by_head:
            yield from self.matrices(outputs, inputs, bias=bias)
            return
        yield from self.grouped_matrices(outputs, inputs, spec.kv_heads, bias=bias)

    def grouped_matrices(
        self, outputs: Mapping[str, int], inputs: int, groups: int, *, bias: bool
    ) -> Iterator[ParameterSpec]:
        """Yields matrices that are parts of one tensor, whose rows are divided into equal groups.
        Each group has a share of every matrix, in order.
        """
        whole = sum(outputs.values())
        end = 0
        for role, size in outputs.items():
            start, end = end, end + size // groups
            part = (slice(start, end),)
            piece = CheckpointSlice(
                f"{self._path(role)}.weight", (whole, inputs), part, inputs=1, groups=groups
            )
            yield ParameterSpec(role, (outputs[role], inputs), (piece,), self._layer)
            if bias:
                piece = CheckpointSlice(f"{self._path(role)}.bias", (whole,), part, groups=groups)
                yield ParameterSpec(f"{role}_bias", (outputs[role],), (piece,), self._layer)

    def matrices(
        self, outputs: Mapping[str, int], inputs: int, *, bias: bool
    ) -> Iterator[ParameterSpec]:
        """Yields matrices that have the same inputs. If several roles have the same tensor name,
        their matrices are consecutive rows of that tensor.
        """
        for role, size in outputs.items():
            merged = [other for other in outputs if self._names[other] == self._names[role]]
            start = sum(outputs[other] for other in merged[: merged.index(role)])
            rows = sum(outputs[other] for other in merged)
            part = (slice(start, start + size),) if len(merged) > 1 else ()
            paths = [self._path_to(name) for name in self._names[role].split("|")]
            pieces = [CheckpointSlice(f"{x}.weight", (rows, inputs), part, inputs=1) for x in paths]
            if self._family.transposed:
                own = (slice(None), *(part or (slice(None),)))
                stored = inputs, rows
                pieces = [
                    CheckpointSlice(each.name, stored, own, outputs=1, inputs=0) for each in pieces
                ]
            yield ParameterSpec(role, (size, inputs), tuple(pieces), self._layer)
            if bias:
                biases = tuple(CheckpointSlice(f"{path}.bias", (rows,), part) for path in paths)
                yield ParameterSpec(f"{role}_bias", (size,), biases, self._layer)

    def expert(self, expert: int, experts: ExpertsSpec, hidden: int) -> Iterator[ParameterSpec]:
        """Yields an expert's matrices. A checkpoint may store each as a separate tensor, or as a
        slice of a tensor that stacks all experts, or all shared ones.
        """
        if (routed := experts.count - experts.always) <= expert:
            for role in ("gate", "up", "down"):
                matrix = (hidden, experts.size) if role == "down" else (experts.size, hidden)
                found = self.stack_item(f"always_{role}", expert - routed, experts.always, matrix)
                yield replace(found, role=f"expert_{role}", expert=expert)
            return
        size = experts.size
        interleaved = self._family.experts_interleaved
        transposed = interleaved or self._family.experts_transposed
        gates = (("gate", size, hidden),) if experts.gated else ()
        for role, outputs, inputs in (*gates, ("up", size, hidden), ("down", hidden, size)):
            path = self._path("stacked_gate_up")
            rows = slice(None)
            stacked_rows = 2 * size
            if role == "down":
                path = self._path("stacked_down")
                stacked_rows = hidden
            elif not experts.gated:
                stacked_rows = size
            elif interleaved or self._family.expert_rows_alternate:
                rows = slice(int(role == "up"), None, 2)
            else:
                rows = slice(0, size) if role == "gate" else slice(size, None)
            if transposed:
                shape = (routed, inputs, stacked_rows)
                slices = [
                    CheckpointSlice(path, shape, (expert, slice(None), rows), outputs=2, inputs=1)
                ]
            else:
                slices = [
                    CheckpointSlice(
                        path,
                        (routed, stacked_rows, inputs),
                        (expert, rows),
                        outputs=1,
                        inputs=2,
                    )
                ]
            biases = [
                CheckpointSlice(f"{path}_bias", (routed, stacked_rows), (expert, rows), outputs=1)
            ]
            if self._names[f"expert_{role}"]:
                split = self._path(f"expert_{role}").format(expert)
                slices.insert(0, CheckpointSlice(f"{split}.weight", (outputs, inputs), inputs=1))
                biases.insert(0, CheckpointSlice(f"{split}.bias", (outputs,)))
            yield ParameterSpec(
                f"expert_{role}", (outputs, inputs), tuple(slices), self._layer, expert
            )
            if experts.bias:
                yield ParameterSpec(
                    f"expert_{role}_bias", (outputs,), tuple(biases), self._layer, expert
                )
