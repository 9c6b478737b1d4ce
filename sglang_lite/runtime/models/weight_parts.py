"""Parts of a loaded decoder: the checkpoint tensors that each part is built from, and the values of
these tensors in the decoder.

A part is an attribute of the decoder or of one of its layers. `WeightReader` builds it from tensors
that no other part needs, so a part can be rebuilt by itself once all of its tensors are available.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from itertools import chain
from typing import Any, TypeAlias

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.kernels.packed_weight import PackedWeight
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.layers.experts import Experts, FeedForward
from sglang_lite.runtime.models.layers.linear import (
    Bf16Linear,
    DenseLinear,
    Float16Linear,
    Float32Linear,
    Linear,
    PairedLinear,
    RowByRow,
)
from sglang_lite.runtime.models.layers.low_rank import LowRank
from sglang_lite.runtime.models.layers.mamba import Mamba1Weights
from sglang_lite.runtime.models.layers.router_mlp import RouterMlp
from sglang_lite.runtime.models.layers.state_mixer import StateWeights
from sglang_lite.runtime.models.parameters import (
    ATTENTION_ADDITION,
    CHANNEL_MIXES,
    DELTA_KERNELS,
    DEPTH_QUERIES,
    DYNAMIC_CONVS,
    EMBEDDING_WEIGHTS,
    FEED_FORWARD_ADDITION,
    MAMBA1_NORMS,
    MAMBA2_KERNELS,
    MESSAGE_MATRICES,
    MESSAGE_QUERIES,
    MESSAGE_READERS,
    OUTPUT_FACTORS,
    RESIDUAL_WEIGHTS,
    ROUTER_MATRICES,
    SHORT_CONVS,
    WKV_MIXES,
    XIELU_ROLES,
    CheckpointSlice,
    ParameterSpec,
    head_name,
    input_projection_roles,
    output_projection_role,
    parameters,
    separate_projection_roles,
)
from sglang_lite.runtime.models.rotary_pairs import (
    deinterleave_order,
    head_deinterleave_order,
    latent_query_deinterleave_order,
)
from sglang_lite.runtime.models.spec import AttentionSpec, LatentSpec, ModelSpec
from sglang_lite.runtime.models.vision_tower import possible_stored_names
from sglang_lite.runtime.models.weight_reader import (
    LAYER_PARTS,
    Layer,
    WeightReader,
)

# layer, and the attribute there; None for an attribute of the decoder
PartKey: TypeAlias = tuple[int | None, str]

ROPES: PartKey = (None, "ropes")  # rotary tables; only some GGUF files have a tensor for them

# roles of a state's weights -> attribute; those of a convolution's channels share one
_STATE = {
    **dict.fromkeys((*DELTA_KERNELS, *MAMBA2_KERNELS), "kernel"),
    "delta_a_log": "a_log",
    "delta_dt": "dt",
    "delta_norm": "norm",
    "lightning_norm": "norm",
    "mamba_a_log": "a_log",
    "mamba_dt_offset": "dt",
    "mamba_d": "d",
    "mamba_norm": "norm",
    **dict.fromkeys(MAMBA1_NORMS, "norms"),
    "lru_kernel": "kernel",
    "lru_enter": "enter",
    "lru_enter_offset": "enter_offset",
    "lru_forget": "forget",
    "lru_forget_offset": "forget_offset",
    "lru_decay": "decay",
    **dict.fromkeys(WKV_MIXES, "mixes"),
    "mlstm_norm": "norm",
    "wkv_decay": "decay",
    "wkv_first": "first",
}
# roles of linear layers among a state's weights -> attribute
_STATE_PRODUCTS = {
    "mamba_low": "low",
    "mamba_steps": "steps",
    "delta_z_high": "gate",
    "delta_a_high": "decays",
    "wkv_k": "key",
    "wkv_v": "value",
    "wkv_r": "receptance",
}
_LATENT = frozenset(("q_a_norm", "q_b", "kv_a_norm", "kv_b"))
_OTHERS = {
    "o": "output",
    "conv_out": "output",
    "delta_out": "output",
    "lightning_out": "output",
    "mamba_out": "output",
    "lru_out": "output",
    "wkv_out": "output",
    "mlstm_out": "output",
    **dict.fromkeys((*CHANNEL_MIXES, "channel_r"), "channel_mix"),
    "conv_kernel": "kernel",
    "attention_out_norm": "post_attention_norm",
    "mlp_out_norm": "post_mlp_norm",
    **dict.fromkeys(("first_taps", "second_taps", "key_factor"), "convolutions"),
    **dict.fromkeys((*SHORT_CONVS, *DYNAMIC_CONVS, *OUTPUT_FACTORS), "short_convs"),
    **{role: part for part, roles in RESIDUAL_WEIGHTS.items() for role in roles},
}
# roles of the message gates' matrices -> attribute of `MessageGates`, and index in it
_MESSAGE_GATES = {
    f"{role}_message_{part}": (part, i)
    for i, role in enumerate(MESSAGE_READERS)
    for part in MESSAGE_MATRICES
}
# roles of the weights of attention's convolutions -> attribute
_CONVOLUTIONS = {
    "first_taps": "first",
    "first_taps_bias": "first_bias",
    "second_taps": "second",
    "second_taps_bias": "second_bias",
    "key_factor": "scale",
}
# roles of parameters that are each a separate part
_OWN = frozenset(
    (
        "input_norm",
        "q_norm",
        "k_norm",
        "sinks",
        "mlp_norm",
        "experts_norm",
        "router_scale",
        "shared_out_norm",
        "experts_out_norm",
        "inputs_first",
        "inputs_output",
        "inputs_norm",
        "layer_scale",
        "distance_bank",
        "distance_scale",
        "query_scale",
        "key_input_norm",
        "value_input_norm",
        *DEPTH_QUERIES,
        "block_output",
        "beside_norm",
    )
)
# roles of low-rank additions -> attribute
_ADDITIONS = {
    role: part
    for part, additions in (
        ("qkv_addition", ATTENTION_ADDITION),
        ("gate_up_addition", FEED_FORWARD_ADDITION),
    )
    for roles in additions
    for role in roles
}


def part_key(spec: ModelSpec, parameter: ParameterSpec) -> PartKey:
    """Returns the key of the part that a parameter belongs to."""
    role = parameter.role.removesuffix("_bias").partition(".")[0]
    if parameter.layer is None:
        if role in EMBEDDING_WEIGHTS:
            return None, "embedding_sum"
        if role in MESSAGE_QUERIES:
            return None, "message_queries"
        return None, "layer_inputs" if role.startswith("layer_inputs") else role
    layer = spec.layers[parameter.layer]
    for part, roles in separate_projection_roles(layer.attention).items():
        if role in roles:
            return parameter.layer, part
    if role in input_projection_roles(layer.attention):
        return parameter.layer, "qkv"
    if layer.beside is not None:
        if role in input_projection_roles(layer.beside):
            return parameter.layer, "beside_first"
        if role == output_projection_role(layer.beside):
            return parameter.layer, "beside_output"
    if role in _OWN:
        return parameter.layer, role
    if role in _STATE or role in _STATE_PRODUCTS:
        return parameter.layer, "state"
    if role in _ADDITIONS:
        return parameter.layer, _ADDITIONS[role]
    if role in _MESSAGE_GATES:
        return parameter.layer, "message_gates"
    return parameter.layer, "latent" if role in _LATENT else _OTHERS.get(role, "feed_forward")


# of any part
def part_builders(model: Decoder, reader: WeightReader) -> dict[PartKey, Callable[[], Any]]:
    """Returns the functions that build the parts of a decoder from a reader's source, in the order
    of the parts.
    """
    tied = model.spec.tied_embeddings
    functions: dict[PartKey, Callable[[], Any]] = {
        ROPES: lambda: reader.rotary_tables(model.max_positions),
        (None, "embedding"): reader.embedding_and_head if tied else reader.embedding,
        **({} if tied else {(None, "head"): reader.head}),
    }
    if model.spec.learned_positions:
        functions[None, "position_table"] = reader.position_table
    if model.spec.embedding_norm:
        functions[None, "embedding_norm"] = reader.embedding_norm
    if model.spec.looped_layers:
        functions[None, "message_queries"] = reader.message_queries
    if model.spec.blocks:
        functions[None, "last_query"] = reader.last_query
    if model.spec.embedding_weights:
        functions[None, "embedding_sum"] = reader.embedding_sum
    if model.spec.layer_input_tokens:
        functions[None, "layer_inputs"] = reader.layer_inputs
    for i in range(len(model.layers)):
        functions |= {(i, name): make for name, make in reader.layer_parts(i).items()}
    return functions | {(None, "norm"): reader.norm}


def look_up_part(model: Decoder, key: PartKey) -> Any:  # any part
    """Returns a part of a decoder. With tied embeddings, the embedding is returned together with
    the head.
    """
    layer, name = key
    if key == (None, "embedding") and model.spec.tied_embeddings:
        return model.embedding, model.head
    return getattr(model if layer is None else model.layers[layer], name)


def part_keys(model: Decoder) -> Iterator[PartKey]:
    """Yields the keys of the parts for which every checkpoint has tensors."""
    own = () if model.spec.tied_embeddings else ((None, "head"),)
    table = ((None, "position_table"),) if model.spec.learned_positions else ()
    norm = ((None, "embedding_norm"),) if model.spec.embedding_norm else ()
    inputs = ((None, "layer_inputs"),) if model.spec.layer_input_tokens else ()
    sums = ((None, "embedding_sum"),) if model.spec.embedding_weights else ()
    last = ((None, "last_query"),) if model.spec.blocks else ()
    if model.spec.looped_layers:
        last = (*last, (None, "message_queries"))
    yield from ((None, "embedding"), *own, *table, *norm, *sums, *inputs, *last, (None, "norm"))
    for i, layer in enumerate(model.layers):
        if layer.spec.repeats is None:
            yield from ((i, name) for name in LAYER_PARTS)


def drop_parts(model: Decoder) -> None:
    """Frees the weights of a decoder on a CPU. It can't run until they are replaced."""
    for layer, name in (*part_keys(model), (None, "head")):
        setattr(model if layer is None else model.layers[layer], name, None)
    model.release_small_batch_step()


class WeightParts:
    """Tensors of a decoder by the names that a checkpoint may have for them.

    Args:
        model: loaded decoder.
    """

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._of_name: dict[str, list[ParameterSpec]] = {}
        self._of_part: dict[PartKey, list[ParameterSpec]] = {}
        for parameter in parameters(model.spec):
            self._of_part.setdefault(part_key(model.spec, parameter), []).append(parameter)
            for piece in parameter.slices:
                self._of_name.setdefault(piece.name, []).append(parameter)
        self._extra: dict[str, PartKey] = {"rope_freqs.weight": ROPES}
        if model.spec.tied_embeddings:
            self._extra[f"{head_name(model.spec)}.weight"] = None, "embedding"
            self._of_part.setdefault((None, "embedding"), []).extend(
                self._of_part.pop((None, "head"), [])
            )
        self._encoder = {
            stored: parameter
            for name, parameter in model.encoder_weights.items()
            for stored in possible_stored_names(name)
        }

    def key(self, name: str) -> PartKey | None:
        """Returns the key of the part that a tensor belongs to, or None if the model has no place
        for a tensor of this name.
        """
        if name in self._extra:
            return self._extra[name]
        if name not in self._of_name:
            return None
        key = part_key(self._model.spec, self._of_name[name][0])
        return (
            (None, "embedding")
            if key == (None, "head") and self._model.spec.tied_embeddings
            else key
        )

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of a checkpoint's tensor, or None if the model uses no tensor of this
        name.
        """
        if name in self._encoder:
            return tuple(self._encoder[name].shape)
        pieces = (piece for parameter in self._of_name.get(name, ()) for piece in parameter.slices)
        return next((piece.shape for piece in pieces if piece.name == name), None)

    def missing_tensors(self, key: PartKey, given: Container[str]) -> list[str]:
        """Returns the names of the tensors that a part needs and that are not in `given`."""
        missing = (
            p.slices[0].name
            for p in self._of_part.get(key, ())
            if not any(piece.name in given for piece in p.slices)
        )
        return list(dict.fromkeys(missing))

    def names(self) -> list[str]:
        """Returns one name for each tensor, even if checkpoints may use several."""
        decoder = (p.slices[0].name for found in self._of_part.values() for p in found)
        return list(dict.fromkeys((*decoder, *self._model.encoder_weights)))

    def read_held_tensor(self, name: str) -> torch.Tensor:
        """Returns the values of a checkpoint's tensor as the decoder holds them, on its device.

        Raises:
            ModelError: the model has no tensor of this name, has it in fewer bits, or has dropped
                it.
        """
        if name in self._encoder:
            return self._encoder[name].data
        if name in self._extra and self._extra[name] == (None, "embedding"):
            return self._value(self._of_part[None, "embedding"][0])
        if name not in self._of_name:
            raise ModelError(
                f"{name!r} is no tensor of this model.", hint=f"One is {self.names()[0]!r}."
            )
        whole: torch.Tensor | None = None
        for parameter in self._of_name[name]:
            piece = next(each for each in parameter.slices if each.name == name)
            value = self._value(parameter)
            if not piece.part:
                return value
            if whole is None:
                whole = torch.empty(piece.shape, dtype=value.dtype, device=value.device)
            _view_parameter_slice(whole, piece).copy_(
                value.view(piece.groups, -1, *value.shape[1:]) if piece.groups > 1 else value
            )
        assert whole is not None
        return whole

    def _value(self, parameter: ParameterSpec) -> torch.Tensor:
        model, (layer, part) = self._model, part_key(self._model.spec, parameter)
        dropped = getattr(model if layer is None else model.layers[layer], part) is None
        found = None
        if not dropped:
            found = (
                _held_model_tensor(model, parameter)
                if layer is None
                else self._held_layer_tensor(parameter)
            )
        if found is None:
            why = (
                "was dropped while the engine slept"
                if dropped
                else "is in fewer bits in this engine"
            )
            raise ModelError(
                f"{parameter.slices[0].name} {why}, and can't be read back.",
                hint="Give all tensors of its product together: q, k and v, or gate, up and down.",
            )
        return found

    def _held_layer_tensor(self, parameter: ParameterSpec) -> torch.Tensor | None:
        assert parameter.layer is not None
        layer = self._model.layers[parameter.layer]
        spec = self._model.spec
        role, _, head = parameter.role.removesuffix("_bias").partition(".")
        is_bias = parameter.role.endswith("_bias")
        attention = layer.spec.attention
        if role == "sinks":
            return layer.sinks
        if role == "layer_scale":
            return layer.layer_scale
        if role in ("distance_bank", "distance_scale", "query_scale", *DEPTH_QUERIES):
            own: torch.Tensor = getattr(layer, role)
            return own.view(parameter.shape)
        for kernels in (SHORT_CONVS, DYNAMIC_CONVS):
            if role in kernels:
                assert layer.short_convs is not None
                return layer.short_convs.taps[kernels.index(role)]
        if role in _MESSAGE_GATES:
            name, at = _MESSAGE_GATES[role]
            return _dense_matrix(getattr(layer.message_gates, name)[at])
        if role in OUTPUT_FACTORS:
            assert layer.short_convs is not None
            return layer.short_convs.factor
        if role == "router_scale":
            assert layer.router_scale is not None
            return layer.router_scale.mul(spec.hidden_size**0.5)
        if role == "expert_scales":
            assert not isinstance(layer.feed_forward, FeedForward)
            return layer.feed_forward.scales
        if parameter.role in _CONVOLUTIONS:
            held: torch.Tensor = getattr(layer.convolutions, _CONVOLUTIONS[parameter.role])
            return held
        for part, roles in RESIDUAL_WEIGHTS.items():
            if role in roles:
                weights: torch.Tensor = getattr(layer, part)
                return weights[roles.index(role)]
        if role in ("router_carry", "router_inner_norm"):
            router = _router_mlp(layer)
            return router.carry if role == "router_carry" else router.norm
        if role in CHANNEL_MIXES:
            assert layer.channel_mix is not None
            return layer.channel_mix.mixes[CHANNEL_MIXES.index(role)]
        if role == "conv_kernel":
            assert layer.kernel is not None
            return layer.kernel[-1] if is_bias else layer.kernel[:-1].T
        if role in _STATE:
            return self._held_state_tensor(layer.state, parameter)
        if isinstance(layer.state, Mamba1Weights) and role in _STATE_PRODUCTS:
            return _dense_matrix(getattr(layer.state, _STATE_PRODUCTS[role])[int(head or 0)])
        if role == "correction":
            assert not isinstance(layer.feed_forward, FeedForward)
            return layer.feed_forward.correction
        if role in XIELU_ROLES:
            assert isinstance(layer.feed_forward, FeedForward)
            assert layer.feed_forward.curve is not None
            return layer.feed_forward.curve[XIELU_ROLES.index(role)].view(parameter.shape)
        if role == "kv_b":
            latent = layer.latent
            assert latent is not None
            return torch.cat((latent.keys.weight, latent.values.weight.transpose(1, 2)), 1).flatten(
                0, 1
            )
        if role.endswith("_norm"):
            order = None
            if role in ("q_norm", "k_norm"):
                assert isinstance(attention, AttentionSpec)
                order = head_deinterleave_order(attention)
            weight = _norm(layer, part_key(spec, parameter)[1], role)
            return _norm_values(weight, spec, order, int(head) if head else None, is_bias=is_bias)
        product, roles, order = _product(layer, role, parameter.expert)
        rows = _bias(product) if is_bias else _dense_matrix(product)
        if rows is None:
            return None
        if order is not None:
            rows = torch.empty_like(rows).index_copy_(0, order.to(rows.device), rows)
        sizes = {
            p.role: p.shape[0]
            for p in self._of_part[part_key(spec, parameter)]
            if p.expert == parameter.expert and p.shape
        }
        at = sum(sizes[each] for each in roles[: roles.index(role)])
        return rows[at : at + sizes[role]]

    def _held_state_tensor(
        self, weights: StateWeights | None, parameter: ParameterSpec
    ) -> torch.Tensor:
        """Returns a parameter, other than the projections, of a layer with a recurrent state."""
        role, _, group = parameter.role.removesuffix("_bias").partition(".")
        if isinstance(weights, Mamba1Weights) and role in MAMBA1_NORMS:
            return weights.norms[MAMBA1_NORMS.index(role)]
        found: torch.Tensor = getattr(weights, _STATE[role])
        if role in WKV_MIXES:
            return found[WKV_MIXES.index(role)]
        if _STATE[role] != "kernel":
            size = parameter.shape[0]
            return found.narrow(0, int(group) * size, size) if group else found
        channels = [
            p
            for p in self._of_part[part_key(self._model.spec, parameter)]
            if _STATE.get(p.role) == "kernel"
        ]
        at = [p.role for p in channels].index(role)
        start = sum(p.shape[0] for p in channels[:at])
        rows = found[:, start : start + parameter.shape[0]]
        return rows[-1] if parameter.role.endswith("_bias") else rows[:-1].T


def _view_parameter_slice(whole: torch.Tensor, piece: CheckpointSlice) -> torch.Tensor:
    """Returns a parameter's slice of a checkpoint's tensor, as a view."""
    if piece.groups > 1:
        return whole.view(piece.groups, -1, *whole.shape[1:])[:, *piece.part]
    part = whole[piece.part]
    return part.t() if piece.is_transposed else part


def _held_model_tensor(model: Decoder, parameter: ParameterSpec) -> torch.Tensor | None:
    inputs = model.layer_inputs
    match parameter.role:
        case "layer_inputs" | "layer_inputs_norm" if inputs is not None:
            return inputs.norm if parameter.role.endswith("norm") else inputs.table
        case "layer_inputs_projection" if inputs is not None:
            return _dense_matrix(inputs.projection)
        case "embedding_shift" | "embedding_factor":
            assert model.embedding_sum is not None
            return model.embedding_sum[EMBEDDING_WEIGHTS.index(parameter.role)]
        case "embedding":
            return model.embedding if isinstance(model.embedding, torch.Tensor) else None
        case "message_queries" | "kv_message_queries":
            assert model.message_queries is not None
            which = [0, 3] if parameter.role == "message_queries" else [1, 2]
            return model.message_queries[:, which].flatten(0, 1)
        case "last_query":
            assert model.last_query is not None
            return model.last_query[0]
        case "position_table":
            return model.position_table
        case "norm" | "norm_bias":
            return _norm_values(
                model.norm, model.spec, None, None, is_bias=parameter.role == "norm_bias"
            )
        case "embedding_norm" | "embedding_norm_bias":
            assert model.embedding_norm is not None
            return _norm_values(
                model.embedding_norm,
                model.spec,
                None,
                None,
                is_bias=parameter.role.endswith("bias"),
            )
        case "head_bias":
            return _bias(model.head)
    return _dense_matrix(model.head)


def _norm(layer: Layer, part: str, role: str) -> torch.Tensor:
    if layer.latent is not None and role in ("q_a_norm", "kv_a_norm"):
        found = layer.latent.query_norm if role == "q_a_norm" else layer.latent.norm
    else:
        found = getattr(layer, part)
    assert found is not None
    return found


def _norm_values(
    weight: torch.Tensor,
    spec: ModelSpec,
    order: torch.Tensor | None,
    head: int | None,
    *,
    is_bias: bool,
) -> torch.Tensor:
    """Returns the weight or bias of a norm in the form in which a checkpoint stores it."""
    if spec.norm == "layer":
        weight = weight[int(is_bias)]
    if head is not None:
        weight = weight[head]
    if order is not None:
        restored = torch.empty_like(weight)
        restored[..., order.to(weight.device)] = weight
        weight = restored
    return weight if is_bias or not spec.norm_offset else weight.float() - spec.norm_offset


# linear layer, its roles, order of its rows
_Product: TypeAlias = tuple[Any, tuple[str, ...], torch.Tensor | None]


def _product(layer: Layer, role: str, expert: int | None) -> _Product:
    """Returns the linear layer that contains a matrix, the roles of the matrices stacked in it, and
    the order of its rows.
    """
    attention = layer.spec.attention
    fed = layer.feed_forward
    for part, roles in separate_projection_roles(attention).items():
        if role in roles:
            return getattr(layer, part), roles, None
    if role in input_projection_roles(attention):
        return layer.qkv, input_projection_roles(attention), deinterleave_order(attention)
    if role == "q_b":
        assert isinstance(attention, LatentSpec)
        assert layer.latent is not None
        return layer.latent.queries, ("q_b",), latent_query_deinterleave_order(attention)
    if role in ("inputs_first", "inputs_output", "block_output"):
        return getattr(layer, role), (role,), None
    if role in _ADDITIONS:
        return _product_of_addition(getattr(layer, _ADDITIONS[role]), role)
    if role == "channel_r":
        assert layer.channel_mix is not None
        return layer.channel_mix.receptance, (role,), None
    if role in _STATE_PRODUCTS:
        return getattr(layer.state, _STATE_PRODUCTS[role]), (role,), None
    beside = layer.spec.beside
    if beside is not None and role in input_projection_roles(beside):
        return layer.beside_first, input_projection_roles(beside), None
    if beside is not None and role == output_projection_role(beside):
        return layer.beside_output, (role,), None
    if role == output_projection_role(attention):
        return layer.output, (role,), None
    if role in ("router", "shared_expert_gate"):
        assert not isinstance(fed, FeedForward)
        if isinstance(fed.router, RouterMlp) and role == "router":
            return fed.router.last, (role,), None
        return fed.router if role == "router" else fed.shared_gate, (role,), None
    if role in ROUTER_MATRICES:
        return getattr(_router_mlp(layer), ROUTER_MATRICES[role]), (role,), None
    prefix, _, kind = role.rpartition("_")
    prefix = f"{prefix}_" if prefix else ""
    if expert is not None and not isinstance(fed, Experts | FeedForward):
        m = fed.matrices
        if kind == "down":
            return _Matrix(m.down, m.down_bias, expert), (role,), None
        both = _Matrix(m.gate_up, m.gate_up_bias, expert)
        return both, (f"{prefix}gate", f"{prefix}up"), None
    if expert is not None:
        assert isinstance(fed, Experts)
        fed = fed.experts[expert]
    elif prefix == "shared_":
        assert not isinstance(fed, FeedForward)
        assert fed.shared is not None
        fed = fed.shared
    assert isinstance(fed, FeedForward)
    if kind == "down":
        return fed.down, (role,), None
    return fed.gate_up, (f"{prefix}gate", f"{prefix}up") if fed.spec.gated else (role,), None


def _router_mlp(layer: Layer) -> RouterMlp:
    fed = layer.feed_forward
    assert not isinstance(fed, FeedForward)
    assert isinstance(fed.router, RouterMlp)
    return fed.router


def _product_of_addition(addition: LowRank, role: str) -> _Product:
    """Same as `_product`, for a matrix of low-rank additions."""
    whole = ATTENTION_ADDITION if role in chain(*ATTENTION_ADDITION) else FEED_FORWARD_ADDITION
    for second, (_, *seconds) in zip(addition.seconds, whole):
        if role in seconds:
            return second, tuple(seconds), None
    return addition.first, tuple(first for first, *_ in whole), None


class _Matrix:
    """Matrix of one expert in a GPU's stack.

    Attributes:
        weight: [outputs, inputs]; None if it is in fewer bits than 16.
        bias: [outputs], or None.
    """

    def __init__(
        self, weights: torch.Tensor | PackedWeight, biases: torch.Tensor | None, expert: int
    ) -> None:
        self.weight = (
            weights[expert] if isinstance(weights, torch.Tensor) and weights.itemsize > 1 else None
        )
        self.bias = None if biases is None else biases[expert]


def _unwrap_linear(linear: Linear | _Matrix) -> Any:  # linear layer inside others
    return _unwrap_linear(linear.linear) if isinstance(linear, PairedLinear | RowByRow) else linear


def _dense_matrix(linear: Linear | _Matrix) -> torch.Tensor | None:
    """Returns the matrix [N, K] of a linear layer, or None if it has fewer bits than the
    checkpoint's.
    """
    linear = _unwrap_linear(linear)
    if isinstance(linear, Bf16Linear | Float32Linear):  # a layer with `few` has blocks, too
        return None if getattr(linear, "few", None) is not None else linear.weight.to_dense()
    if isinstance(linear, Float16Linear):
        matrix: torch.Tensor = torch.ops.quantized.linear_unpack_fp16(linear.weight)[0]
        return matrix
    if isinstance(linear, DenseLinear | _Matrix):
        return linear.weight
    weight = getattr(linear, "weight", None)  # a GPU's layers, whose module needs Triton
    is_plain = (
        isinstance(weight, torch.Tensor)
        and weight.dtype.is_floating_point
        and weight.dtype.itemsize > 1
    )
    return weight if is_plain else None


def _bias(linear: Linear | _Matrix) -> torch.Tensor | None:
    bias: torch.Tensor | None = getattr(_unwrap_linear(linear), "bias", None)
    return bias
