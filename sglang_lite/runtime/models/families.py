"""Table of model families: how each family's config is read and its tensors named. A new family is
a new row.

A row states the differences from Llama. `read_config.py` uses it to read configs;
`parameters.py` has Llama's tensor names.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from sglang_lite.runtime.models.config_fields import Config, Json
from sglang_lite.runtime.models.gemma4 import (
    GEMMA4,
    GEMMA4_EXPERTS,
    gemma4_attention_fields,
    gemma4_dense_fields,
    gemma4_experts,
    gemma4_kinds,
    gemma4_layer_fields,
    gemma4_left_out,
    gemma4_model_fields,
)
from sglang_lite.runtime.models.mixers import (
    bailing_mixer,
    bamba_mixer,
    falcon_h1_mixer,
    granite_mixer,
    jamba_mixer,
    kimi_layer_types,
    kimi_mixer,
    lara_kinds,
    lara_mixer,
    lfm2_mixer,
    lfm3_kinds,
    lfm3_mixer,
    mamba1_mixer,
    mamba1_size,
    mamba2_mixer,
    minimax_mixer,
    nemotron_layer_types,
    nemotron_mixer,
    olmo_mixer,
    qwen_mixer,
    recurrent_gemma_mixer,
    rwkv_layer,
    rwkv_mixer,
    rwkv_size,
    xlstm_mixer,
    xlstm_size,
    zamba2_fields,
    zamba2_layer,
    zamba2_mixer,
    zamba_fields,
    zamba_kinds,
    zamba_layer,
    zamba_mixer,
)
from sglang_lite.runtime.models.spec import (
    NO_ROPE,
    DepthSpec,
    DistanceBiasSpec,
    LayerSpec,
    MixerSpec,
    ShortConvSpec,
)

Changes: TypeAlias = Callable[[Config], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Family:
    """Row of the table: how a family of models differs from Llama.

    Attributes:
        architectures: names of the family's architectures in `config.json`.
        aliases: our name of a config field -> the family's name for it.
        defaults: values of fields that a config may omit, as transformers defines them. If
            "use_sliding_window" is among them, windows apply only if it is true; if
            "use_bidirectional_attention" is, the model may attend both ways.
        biases: whether queries, keys and values, attention's output, and the feed-forward have
            biases: constants, or names of config fields.
        qk_norm: norm of queries and keys, as in AttentionSpec.
        norms: position of the norms, as in LayerSpec.
        has_window: function of config and layer index, True if the layer has a sliding window; used
            if the config has no `layer_types`; None if no layer has a window.
        chunked: whether windows are chunks, which configs call "chunked_attention".
        has_rope: function of config, layer index and window, True if positions rotate the layer's
            queries and keys.
        interleaved: whether the two elements of a rotary pair are adjacent: a constant, or the name
            of a config field.
        latent: whether attention is latent (MLA), configured by DeepSeek's field names.
        latent_gate: whether latent attention has an output gate.
        gated: whether dense feed-forwards have a gate.
        dense_size: field with the size of dense feed-forwards, if the config has it; otherwise
            `intermediate_size` is their size.
        query_growth: whether queries grow with their position, by the field `llama_4_scaling_beta`.
        qkv_by_head: whether queries, keys and values lie in one matrix, grouped by key-value head.
        transposed: whether matrices of layers have inputs before outputs.
        layer_ropes: whether layers with a window have their own rope parameters.
        computed: function of the config, defaults included, that gives fields which the config
            itself omits and the family's own code computes from others.
        rope_aliases: other names of rope types -> names used here.
        activations: activation name in a config -> the activation that the family means by it.
        attention_fields, dense_fields, model_fields: functions of the config that give further fields
            of AttentionSpec, DenseSpec and ModelSpec.
        layer_attention: function of config and layer index that gives further fields of
            AttentionSpec for one layer.
        layer_dense, layer_fields: the same for DenseSpec and LayerSpec.
        nope_fields: function of the config that gives fields of AttentionSpec for layers without
            rotation.
        left_out: function of the config that names a feature which the config requests and this row
            does not support, or returns "". transformers' code runs such a model.
        experts_fields: function of config and layer index that gives fields of ExpertsSpec, or None
            for a dense layer.
        mixer: function of config and layer index that gives the specification of the mixer that the
            layer has in place of attention, or None for attention.
        mixer_norms: position of the norms in layers without attention; None for that of `norms`.
        unroll: function of the config and its layers that returns the layers in execution order, if
            some run several times.
        has_feed_forward: function of config and layer index, False if the layer has none.
        experts_transposed: whether stacked expert matrices have inputs before outputs.
        experts_interleaved: whether, in addition, their gate and up columns alternate.
        expert_rows_alternate: whether gate and up rows alternate in stacked expert matrices.
        names: role in `parameters.py` -> the family's tensor name, if it differs from Llama's; ""
            if no tensor has it. A vector's name that ends in "[0]" is a matrix with a single row. A
            norm may have several names, separated by "|", of which a file has one.
        layer_kinds: the family's names of types of layers -> the names used here.
        block: module of the weights that layers with a block share, as in BlockSpec.
        block_names: names as in `names`, for layers with a block.
        addition_names: names of a block's low-rank additions, numbered by the layers with a block.
    """

    architectures: tuple[str, ...]
    defaults: Mapping[str, Json] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    biases: tuple[bool | str, bool | str, bool | str] = (False, False, False)
    qk_norm: Literal["", "head", "whole"] = ""
    norms: Literal["before", "after", "both", "residual"] = "before"
    has_window: Callable[[Config, int], bool] | None = None
    chunked: bool = False
    has_rope: Callable[[Config, int, int | None], bool] = lambda config, layer, window: True
    interleaved: bool | str = False
    latent: bool = False
    latent_gate: bool = False
    gated: bool = True
    dense_size: str = "intermediate_size"
    query_growth: bool = False
    qkv_by_head: bool = False
    transposed: bool = False
    layer_ropes: bool = False
    computed: Changes = lambda config: {}
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=dict)
    attention_fields: Changes = lambda config: {}
    layer_attention: Callable[[Config, int], dict[str, Any]] = lambda config, layer: {}
    layer_dense: Callable[[Config, int], dict[str, Any]] = lambda config, layer: {}
    nope_fields: Changes = lambda config: {}
    dense_fields: Changes = lambda config: {}
    layer_fields: Callable[[Config, int], dict[str, Any]] = lambda config, layer: {}
    model_fields: Changes = lambda config: {}
    experts_fields: Callable[[Config, int], dict[str, Any] | None] = lambda config, layer: None
    mixer: Callable[[Config, int], MixerSpec | None] = lambda config, layer: None
    mixer_norms: Literal["before", "after", "both"] | None = None
    unroll: Callable[[Config, tuple[LayerSpec, ...]], tuple[LayerSpec, ...]] = (
        lambda config, layers: layers
    )
    has_feed_forward: Callable[[Config, int], bool] = lambda config, layer: True
    experts_transposed: bool = False
    experts_interleaved: bool = False
    expert_rows_alternate: bool = False
    left_out: Callable[[Config], str] = lambda config: ""
    names: Mapping[str, str] = field(default_factory=dict)
    layer_kinds: Mapping[str, str] = field(default_factory=dict)
    block: str = ""
    block_names: Mapping[str, str] = field(default_factory=dict)
    addition_names: Mapping[str, str] = field(default_factory=dict)


def _every_layer(config: Config, layer: int) -> bool:
    return True


def _after_max_window_layers(config: Config, layer: int) -> bool:
    return layer >= int(config["max_window_layers"])


def _except_every_nth_layer(field: str) -> Callable[[Config, int], bool]:
    """Returns a predicate that is False for every n-th layer, where n is the value of a config
    field.
    """
    return lambda config, layer: (layer + 1) % int(config[field]) > 0


def _query_scale(config: Config) -> dict[str, Any]:
    return {"scale": config["query_pre_attn_scalar"] ** -0.5}


def _gemma_model_settings(config: Config) -> dict[str, Any]:
    return {"norm_offset": 1.0, "embedding_scale": math.sqrt(config["hidden_size"])}


def _recurrent_gemma_model_settings(config: Config) -> dict[str, Any]:
    scale = _round_to_bfloat16(math.sqrt(config["hidden_size"]))
    return {
        "norm_offset": 1.0,
        "embedding_scale": scale,
        "logit_softcap": config["logits_soft_cap"],
    }


def _granite_attention_settings(config: Config) -> dict[str, Any]:
    return {"scale": float(config["attention_multiplier"])}


def _granite_layer_settings(config: Config, layer: int) -> dict[str, Any]:
    return {"residual_scale": float(config["residual_multiplier"])}


def _granite_model_settings(config: Config) -> dict[str, Any]:
    return {
        "embedding_scale": float(config["embedding_multiplier"]),
        "logit_scale": 1.0 / config["logits_scaling"],
    }


def _layer_norm_settings(eps: str, *, bias: bool = True, offset: float = 0.0) -> Changes:
    """Returns model fields for layer norms instead of RMS norms.

    Args:
        eps: config field that holds the epsilon.
        bias: whether the norms have biases.
        offset: number added to the weights, as in ModelSpec.norm_offset.
    """
    return lambda config: {
        "norm": "layer",
        "norm_bias": bias,
        "norm_offset": offset,
        "rms_eps": config[eps],
    }


def _qk_norm_settings(flag: str, kind: str, *, bias: bool = False) -> Changes:
    """Returns attention fields for query and key norms of the given kind, enabled by a config flag."""
    return lambda config: {"qk_norm": kind if config.get(flag) else "", "qk_norm_bias": bias}


def _clip_settings(config: Config) -> dict[str, Any]:
    return {"clip": config.get("clip_qkv")}


def _cohere_model_settings(config: Config) -> dict[str, Any]:
    return {
        **_layer_norm_settings("layer_norm_eps", bias=False)(config),
        "logit_scale": config["logit_scale"],
    }


def _has_rope_smollm3(config: Config, layer: int, window: int | None) -> bool:
    """Returns whether a layer of SmolLM3 applies rotary embedding. The config lists this for each
    layer. Without such a list, every n-th layer has none.
    """
    listed = config.get("no_rope_layers")
    if not listed:
        return (layer + 1) % int(config["no_rope_layer_interval"]) > 0
    if not isinstance(listed, list) or len(listed) != config["num_hidden_layers"]:
        raise ValueError(f"no_rope_layers doesn't fit {config['num_hidden_layers']} layers")
    return bool(listed[layer])


def _expert_count(config: Config, name: str) -> int:
    """Returns a layer's number of experts. Looks in the fields of other families, too, since
    transformers may write any of them.
    """
    others = ("num_local_experts", "num_experts", "n_routed_experts")
    given = (config[other] for other in others if other != name and config.get(other) is not None)
    found = next(given, None)
    return int(config[name] if found is None else found)


def _local_experts(config: Config, layer: int) -> dict[str, Any] | None:
    return {
        "count": _expert_count(config, "num_local_experts"),
        "size": config["intermediate_size"],
        "normalise": True,
    }


def _qwen_experts(config: Config, layer: int) -> dict[str, Any] | None:
    dense = config.get("mlp_only_layers") or []
    dense = dense if isinstance(dense, list) else [dense]
    count = _expert_count(config, "num_experts")
    if layer in dense or (layer + 1) % config["decoder_sparse_step"] or not count:
        return None
    return {
        "count": count,
        "size": config["moe_intermediate_size"],
        "normalise": config["norm_topk_prob"],
    }


def _qwen2_experts(config: Config, layer: int) -> dict[str, Any] | None:
    experts = _qwen_experts(config, layer)
    return experts and {
        **experts,
        "shared_size": config["shared_expert_intermediate_size"],
        "shared_gate": True,
    }


def _lara_experts(config: Config, layer: int) -> dict[str, Any] | None:
    experts = _qwen2_experts(config, layer)
    return experts and {**experts, "shared_gate": False}


def _qwen3_vl_experts(config: Config, layer: int) -> dict[str, Any] | None:
    size = config["moe_intermediate_size"]
    hidden = config["hidden_size"]
    # some files put inputs before outputs, others after; only the shape tells
    if hidden in (size, 2 * size):
        raise ValueError(
            f"experts of {size} by hidden_size {hidden} have square matrices, of unknown orientation"
        )
    return _qwen_experts({**config, "norm_topk_prob": True}, layer)


def _olmoe_experts(config: Config, layer: int) -> dict[str, Any] | None:
    size = config["intermediate_size"]
    normalise = config["norm_topk_prob"]
    return {"count": _expert_count(config, "num_experts"), "size": size, "normalise": normalise}


def _gpt_oss_experts(config: Config, layer: int) -> dict[str, Any] | None:
    return {
        "count": _expert_count(config, "num_local_experts"),
        "size": config["intermediate_size"],
        "normalise": True,
        "router_bias": True,
        "bias": True,
        "activation": "clamped",
        "alpha": float(config["swiglu_alpha"]),
        "limit": float(config["swiglu_limit"]),
    }


def _deepseek2_experts(config: Config, layer: int) -> dict[str, Any] | None:
    if layer < config["first_k_dense_replace"] or layer % config["moe_layer_freq"]:
        return None
    limited = config["topk_method"] == "group_limited_greedy"
    if not limited and config["topk_method"] != "greedy":
        raise ValueError(f"topk_method {config['topk_method']!r} is not supported")
    if config.get("norm_topk_prob"):
        raise ValueError("norm_topk_prob is not supported")
    return {
        "count": _expert_count(config, "n_routed_experts"),
        "size": config["moe_intermediate_size"],
        "groups": config["n_group"] if limited else 1,
        "kept_groups": config["topk_group"] if limited else 1,
        "scale": float(config["routed_scaling_factor"]),
        "shared_size": config["moe_intermediate_size"] * (config["n_shared_experts"] or 0),
    }


def _glm4_lite_experts(config: Config, layer: int) -> dict[str, Any] | None:
    kinds = config.get("mlp_layer_types")
    if kinds is not None and len(kinds) != config["num_hidden_layers"]:
        raise ValueError(f"mlp_layer_types {kinds} don't fit {config['num_hidden_layers']} layers")
    dense = layer < config["first_k_dense_replace"] if kinds is None else kinds[layer] != "sparse"
    return None if dense else _sigmoid_experts(config, layer)


def _glm4_experts(config: Config, layer: int) -> dict[str, Any] | None:
    return None if layer < config["first_k_dense_replace"] else _sigmoid_experts(config, layer)


def _sigmoid_experts(config: Config, layer: int) -> dict[str, Any]:
    return {
        "count": _expert_count(config, "n_routed_experts"),
        "size": config["moe_intermediate_size"],
        "scoring": "sigmoid",
        "groups": config["n_group"],
        "kept_groups": config["topk_group"],
        "group_top": 2,
        "correction": True,
        "normalise": config["norm_topk_prob"],
        "scale": float(config["routed_scaling_factor"]),
        "shared_size": config["moe_intermediate_size"] * (config["n_shared_experts"] or 0),
    }


def _exaone_experts(config: Config, layer: int) -> dict[str, Any] | None:
    return _glm4_lite_experts({**config, "n_shared_experts": config["num_shared_experts"]}, layer)


def _minimax_experts(config: Config, layer: int) -> dict[str, Any] | None:
    experts = _local_experts(config, layer)
    return experts and {**experts, "scoring": "sigmoid", "correction": True}


def _minimax_state_experts(config: Config, layer: int) -> dict[str, Any] | None:
    experts = _local_experts(config, layer)
    return experts and {**experts, "scale": float(config["mlp_beta_factor"])}


def _minimax_layer_settings(config: Config, layer: int) -> dict[str, Any]:
    kind = "linear_attn" if minimax_mixer(config, layer) else "full_attn"
    return {"kept": (float(config[f"{kind}_alpha_factor"]), float(config["mlp_alpha_factor"]))}


def _minimax_left_out(config: Config) -> str:
    """Names a rotation of parts of heads, which transformers ignores. Returns "" if there is none."""
    rope = config.get("rope_parameters")
    whole = {**(rope if isinstance(rope, Mapping) else {}), **config}
    if whole.get("partial_rotary_factor") not in (None, 1):
        return "partial_rotary_factor"
    return "" if whole.get("rotary_dim") in (None, whole.get("head_dim")) else "rotary_dim"


def _ernie_experts(config: Config, layer: int) -> dict[str, Any] | None:
    last = config["moe_layer_end_index"]
    first = config["moe_layer_start_index"]
    if layer < first or (last >= 0 and layer > last) or (layer + 1) % config["moe_layer_interval"]:
        return None
    if config["use_bias"]:
        raise ValueError("use_bias is not supported with experts")
    size = config["moe_intermediate_size"]
    return {
        "count": _expert_count(config, "moe_num_experts"),
        "size": size,
        "correction": True,
        "normalise": True,
        "shared_size": size * config["moe_num_shared_experts"],
    }


def _hunyuan_experts(config: Config, layer: int) -> dict[str, Any] | None:
    top_k = config["moe_topk"]
    if isinstance(top_k, list):
        if len(top_k) != config["num_hidden_layers"]:
            raise ValueError(f"moe_topk doesn't fit {config['num_hidden_layers']} layers")
        top_k = top_k[layer]
    size = config["intermediate_size"]
    return {
        "count": _expert_count(config, "num_experts"),
        "top_k": top_k,
        "size": size,
        "normalise": True,
        "shared_size": size,
    }


def _neox_attention_settings(config: Config) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads != kv_heads:
        raise ValueError(
            f"num_key_value_heads is {kv_heads}, and each of {heads} heads has its own keys and values"
        )
    return {}


def _gpt_fields(config: Config) -> dict[str, Any]:
    return {"intermediate_size": 4 * config["hidden_size"], **_rotary_part(config)}


def _gpt2_left_out(config: Config) -> str:
    if config.get("scale_attn_weights", True) is not True:
        return "scale_attn_weights false"
    names = ("scale_attn_by_inverse_layer_idx", "add_cross_attention")
    return next((name for name in names if config.get(name)), "")


def _opt_model_settings(config: Config) -> dict[str, Any]:
    affine = config["layer_norm_elementwise_affine"]
    return {
        **_layer_norm_settings("layer_norm_eps", bias=affine)(config),
        "norm_weight": affine,
        "learned_positions": config["max_position_embeddings"],
        "position_offset": 2,
    }


def _opt_left_out(config: Config) -> str:
    if config.get("do_layer_norm_before") is False:
        return "do_layer_norm_before false"
    if config.get("_remove_final_layer_norm"):
        return "_remove_final_layer_norm"
    size = config.get("word_embed_proj_dim")
    return "" if size in (None, config.get("hidden_size")) else f"word_embed_proj_dim {size}"


def _falcon_fields(config: Config) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    shared = config["multi_query"] and not config["new_decoder_architecture"]
    kv_heads = 1 if shared else config.get("num_kv_heads") or heads
    return {"intermediate_size": 4 * config["hidden_size"], "num_key_value_heads": kv_heads}


def _falcon_layer_settings(config: Config, layer: int) -> dict[str, Any]:
    if not config["parallel_attn"]:
        return {}
    norms = config.get("num_ln_in_parallel_attn") or 2
    two = config["new_decoder_architecture"] and norms == 2
    return {"parallel": "two norms" if two else "one norm"}


def _falcon_attention_settings(config: Config) -> dict[str, Any]:
    """Returns the slopes of ALiBi, rounded to bfloat16 and scaled like the scores, as in Falcon's
    own code.
    """
    if not config["alibi"]:
        return {}
    heads = config["num_attention_heads"]
    scale = (config["hidden_size"] // heads) ** -0.5
    return {"slopes": tuple(_round_to_bfloat16(x) * scale for x in _alibi_slopes(heads))}


def _round_to_bfloat16(number: float) -> float:
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF_0000
    rounded: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return rounded


def _alibi_slopes(heads: int) -> tuple[float, ...]:
    """Returns the slopes of ALiBi (arXiv:2108.12409). With P the largest power of two that is at
    most `heads`, these are the slopes for P heads, followed by every second slope for 2 P heads.
    """
    power = 1 << heads.bit_length() - 1
    others = range(1, 2 * (heads - power), 2)
    return (
        *(2.0 ** (-8 * i / power) for i in range(1, power + 1)),
        *(2.0 ** (-4 * i / power) for i in others),
    )


def _bloom_left_out(config: Config) -> str:
    after = "apply_residual_connection_post_layernorm"
    return after if config.get(after) else ""


def _mpt_left_out(config: Config) -> str:
    given = config.get("attn_config")
    attention = given if isinstance(given, Mapping) else {}
    if attention.get("alibi", True) is not True:
        return "attn_config.alibi false"
    if attention.get("alibi_bias_max", 8) != 8:
        return "attn_config.alibi_bias_max other than 8"
    if attention.get("attn_type", "multihead_attention") != "multihead_attention":
        return "attn_config.attn_type"
    if config.get("no_bias", True) is not True:
        return "no_bias false"
    names = [name for name in ("qk_ln", "prefix_lm") if attention.get(name)]
    return f"attn_config.{names[0]}" if names else ""


def _mpt_fields(config: Config) -> dict[str, Any]:
    attention = config.get("attn_config") or {}
    size = int(config["expansion_ratio"]) * config["hidden_size"]
    names = ("clip_qkv", "softmax_scale")
    own = {name: attention.get(name) for name in names}
    return {"intermediate_size": size, "own_size": size, **own}


def _mpt_attention_settings(config: Config) -> dict[str, Any]:
    """Returns the slopes and the scale. If the number of heads is not a power of two, the slopes
    are those for the next power of two, in another order: the second, fourth and so on come first.
    """
    heads = config["num_attention_heads"]
    power = 1 << (heads - 1).bit_length()
    slopes = tuple(2.0 ** (-8 * i / power) for i in range(1, power + 1))
    if power != heads:
        slopes = (slopes[1::2] + slopes[::2])[:heads]
    scale = config.get("softmax_scale") or (config["hidden_size"] // heads) ** -0.5
    return {"slopes": slopes, "scale": scale, **_clip_settings(config)}


def _falcon_left_out(config: Config) -> str:
    serial = config.get("new_decoder_architecture") and config.get("parallel_attn") is False
    return "parallel_attn false with new_decoder_architecture" if serial else ""


def _afmoe_experts(config: Config, layer: int) -> dict[str, Any] | None:
    if layer < config["num_dense_layers"]:
        return None
    size = config["moe_intermediate_size"]
    return {
        "count": _expert_count(config, "num_experts"),
        "size": size,
        "scoring": "sigmoid",
        "correction": True,
        "normalise": True,
        "scale": float(config["routed_scaling_factor"]),
        "shared_size": size * config["num_shared_experts"],
    }


def _cohere2_moe_dense(config: Config, layer: int) -> bool:
    kinds = config.get("mlp_layer_types")
    if kinds is not None and len(kinds) != config["num_hidden_layers"]:
        raise ValueError(f"mlp_layer_types {kinds} don't fit {config['num_hidden_layers']} layers")
    dense = layer < config["first_k_dense_replace"] if kinds is None else kinds[layer] == "dense"
    return bool(dense)


def _cohere2_moe_window(config: Config, layer: int) -> bool:
    """Returns whether a layer has a window. Among the first dense layers, every n-th has none;
    among the layers after these, every m-th.
    """
    dense = int(config["first_k_dense_replace"])
    if layer < dense:
        return (layer + 1) % int(config["prefix_dense_sliding_window_pattern"]) > 0
    return (layer - dense + 1) % int(config["sliding_window_pattern"]) > 0


def _cohere2_moe_rope(config: Config, layer: int, window: int | None) -> bool:
    forced = config["prefix_dense_sliding_window_pattern"] == 1
    return window is not None or bool(forced and _cohere2_moe_dense(config, layer))


def _cohere2_moe_experts(config: Config, layer: int) -> dict[str, Any] | None:
    if _cohere2_moe_dense(config, layer):
        return None
    scoring = config["expert_selection_fn"]
    strategy = config["shared_expert_combination_strategy"]
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"expert_selection_fn {scoring!r} is not supported")
    if strategy not in ("average", "sum"):
        raise ValueError(f"shared_expert_combination_strategy {strategy!r} is not supported")
    size = config["intermediate_size"]
    shared = config["num_shared_experts"]
    share = 0.5 if shared and strategy == "average" else 1.0
    return {
        "count": _expert_count(config, "num_experts"),
        "size": size,
        "scoring": scoring,
        "normalise": scoring == "softmax" or config["norm_topk_prob"],
        "scale": share,
        "shared_size": size * shared,
        "shared_scale": share,
    }


def _cohere2_moe_model_settings(config: Config) -> dict[str, Any]:
    if config.get("rms_norm_eps") is not None:
        return {"rms_eps": config["rms_norm_eps"], "logit_scale": config["logit_scale"]}
    return _cohere_model_settings(config)


def _phimoe_experts(config: Config, layer: int) -> dict[str, Any] | None:
    if config["num_experts_per_tok"] != 2:
        raise ValueError("num_experts_per_tok is not 2, and SparseMixer chooses two experts")
    return {
        "count": _expert_count(config, "num_local_experts"),
        "size": config["intermediate_size"],
        "scoring": "sparsemixer",
        "jitter": float(config["router_jitter_noise"]),
    }


def _rotary_part(config: Config) -> dict[str, Any]:
    """Returns the rotated fraction of a head, computed from the config's number of elements."""
    if config.get("rotary_dim") is None:
        return {}
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {"partial_rotary_factor": config["rotary_dim"] / head_dim}


def _draft_layer_settings(config: Config) -> dict[str, Any]:
    return {"draft_layers": config.get("num_nextn_predict_layers") or 0}


def _minicpm3_layer_settings(config: Config, layer: int) -> dict[str, Any]:
    depth = config["scale_depth"]
    return {
        "residual_scale": 1.0 if depth is None else depth / math.sqrt(config["num_hidden_layers"])
    }


def _minicpm3_model_settings(config: Config) -> dict[str, Any]:
    base = config["dim_model_base"]
    hidden = config["hidden_size"]
    return {"embedding_scale": float(config["scale_emb"]), "logit_scale": (base or hidden) / hidden}


def _llama4_nope_fields(config: Config) -> dict[str, Any]:
    """Returns the changes of layers without rotation, whose queries grow with their position."""
    plain = {"qk_norm": "", "norms_rotated": False}
    if not config["attn_temperature_tuning"]:
        return plain
    growth = float(config["attn_scale"])
    rope = replace(
        NO_ROPE, query_growth=growth, query_span=int(config["floor_scale"]), query_shift=1
    )
    return {**plain, "rope": rope}


def _llama4_experts(config: Config, layer: int) -> dict[str, Any] | None:
    chosen = config.get("moe_layers")
    step = int(config["interleave_moe_layer_step"])
    if (layer + 1) % step if chosen is None else layer not in chosen:
        return None
    size = config["intermediate_size"]
    return {
        "count": _expert_count(config, "num_local_experts"),
        "size": size,
        "scoring": "sigmoid",
        "weigh_input": True,
        "shared_size": size,
    }


def _lfm2_fields(config: Config) -> dict[str, Any]:
    size = int(config.get("block_ff_dim") or config["intermediate_size"])
    multiplier = config["block_ffn_dim_multiplier"]
    if config["block_auto_adjust_ff_dim"]:
        size = int(2 * size / 3)
        if multiplier is not None:
            unit = int(config["block_multiple_of"])
            size = -(-int(multiplier * size) // unit) * unit
    return {"adjusted_ff_dim": size}


def _qwen_delta_model_settings(config: Config) -> dict[str, Any]:
    return {"norm_offset": 1.0, "draft_layers": 1}


def _lfm2_experts(config: Config, layer: int) -> dict[str, Any] | None:
    if layer < config["num_dense_layers"]:
        return None
    return {
        "count": _expert_count(config, "num_experts"),
        "size": config["moe_intermediate_size"],
        "scoring": "sigmoid",
        "correction": config["use_expert_bias"],
        "normalise": config["norm_topk_prob"],
        "scale": float(config["routed_scaling_factor"]),
    }


def _granite_hybrid_experts(config: Config, layer: int) -> dict[str, Any] | None:
    experts = _local_experts(config, layer)
    if experts is None or not experts["count"]:
        return None
    return {**experts, "shared_size": config["shared_intermediate_size"]}


def _nemotron_experts(config: Config, layer: int) -> dict[str, Any] | None:
    if config["layer_types"][layer] != "moe":
        return None
    return {
        **_sigmoid_experts({**config, "n_shared_experts": 0}, layer),
        "gated": False,
        "shared_size": config["moe_shared_expert_intermediate_size"],
    }


# names of the same fields in early configs of Nemotron-H
_NEMOTRON_ALIASES = {
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "use_conv_bias": "mamba_conv_bias",
    "time_step_limit": "mamba_dt_limit",
}


def _nemotron_left_out(config: Config) -> str:
    if config.get("moe_latent_size"):
        return "moe_latent_size"
    experts = "moe" in (config.get("layers_block_type") or config.get("layer_types") or ())
    if config.get("mlp_bias") and (experts or "E" in (config.get("hybrid_override_pattern") or "")):
        return "mlp_bias with experts"
    twice = {"hidden_act": "mlp_hidden_act", "rms_norm_eps": "layer_norm_epsilon"}
    for other, own in {**twice, **_NEMOTRON_ALIASES}.items():
        given = [config[name] for name in (other, own) if config.get(name) is not None]
        if given[1:] and given[0] != given[1]:  # transformers reads only one of them
            return f"{other} beside another {own}"
    return ""


def _falcon_h1_attention_settings(config: Config) -> dict[str, Any]:
    """Returns factors of attention's scores and outputs that replace the config's factors of its
    input, keys and outputs.
    """
    factor = config["attention_in_multiplier"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return {
        "scale": head_dim**-0.5 * factor * factor * config["key_multiplier"],
        "output_scale": float(factor * config["attention_out_multiplier"]),
    }


def _falcon_h1_dense_settings(config: Config) -> dict[str, Any]:
    gate, inner = config.get("mlp_multipliers") or (1.0, 1.0)
    return {"gate_scale": float(gate), "inner_scale": float(inner)}


def _falcon_h1_left_out(config: Config) -> str:
    """Names a bias of a linear layer that has a factor, by which the code here would multiply the
    bias, too. Returns "" if there is none.
    """
    factors = {
        "attention_bias": ("attention_in_multiplier", "attention_out_multiplier", "key_multiplier"),
        "mlp_bias": ("mlp_multipliers",),
        "mamba_proj_bias": ("ssm_in_multiplier",),
        "projectors_bias": ("ssm_out_multiplier",),
    }
    for bias, names in factors.items():
        if config.get(bias) and any(config.get(x) not in (None, 1.0, [1.0, 1.0]) for x in names):
            return f"{bias} with {', '.join(names)}"
    return ""


def _kimi_left_out(config: Config) -> str:
    if config.get("moe_router_activation_func", "sigmoid") != "sigmoid":
        return f"moe_router_activation_func {config['moe_router_activation_func']!r}"
    if config.get("moe_layer_freq", 1) != 1:
        return "moe_layer_freq other than 1"
    return "" if config.get("mla_use_nope", True) else "mla_use_nope false"


def _jamba_experts(config: Config, layer: int) -> dict[str, Any] | None:
    count = _expert_count(config, "num_experts")
    if count == 1 or layer % config["expert_layer_period"] != config["expert_layer_offset"]:
        return None
    return {"count": count, "size": config["intermediate_size"]}


def _zaya_experts(config: Config, layer: int) -> dict[str, Any] | None:
    return {
        "count": _expert_count(config, "num_experts"),
        "size": config["moe_intermediate_size"],
        "correction": True,
        "router_size": config["router_hidden_size"],
        "carries": layer > 0,
        "skips": True,
    }


def _zaya_left_out(config: Config) -> str:
    return "attention_bias" if config.get("attention_bias") else ""


def _zamba_attention_settings(config: Config) -> dict[str, Any]:
    inputs = 2 * config["hidden_size"]
    if config.get("attention_hidden_size") not in (None, inputs):
        raise ValueError(f"attention_hidden_size is not {inputs}, twice hidden_size")
    return {"scale": (config["head_dim"] / 2) ** -0.5}


def _has_zamba_block(config: Config, layer: int) -> bool:
    return zamba_kinds(config)[layer] == "hybrid"


def _zamba_left_out(config: Config) -> str:
    if config.get("tie_word_embeddings") is False:  # unties blocks, too, in transformers
        return "tie_word_embeddings false"
    return "n_mamba_heads 1" if config.get("n_mamba_heads") == 1 else ""


def _zamba2_left_out(config: Config) -> str:
    if config.get("tie_word_embeddings") is False:  # unties blocks, too, in transformers
        return "tie_word_embeddings false"
    return "use_long_context" if config.get("use_long_context") else ""


def _inkling_fields(config: Config) -> dict[str, Any]:
    """Derives the layer types, which early Inkling configs give in other fields."""
    count = config["num_hidden_layers"]
    local = config.get("local_layer_ids")
    local = [i for i in range(count) if (i + 1) % 6] if local is None else local
    dense = config.get("dense_mlp_idx") or 0
    return {
        "layer_types": [
            "sliding_attention" if i in local else "full_attention" for i in range(count)
        ],
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(count)],
    }


def _inkling_attention(config: Config, layer: int) -> dict[str, Any]:
    local = config["layer_types"][layer] == "sliding_attention"
    prefix = "swa_" if local else ""
    heads = config[f"{prefix}num_attention_heads"]
    kv_heads = config[f"{prefix}num_key_value_heads"]
    size = config[f"{prefix}head_dim"]
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads can't share {kv_heads} key-value heads")
    extent = config["sliding_window" if local else "rel_extent"]
    fields = {
        "heads": heads,
        "kv_heads": kv_heads,
        "key_size": size,
        "value_size": size,
        "scale": 1 / size,
        "distance_bias": DistanceBiasSpec(config["d_rel"], extent),
        "short_convs": ShortConvSpec(config["conv_kernel_size"], config["hidden_size"]),
    }
    floor = None if local else config.get("log_scaling_n_floor")
    if floor is not None and config["log_scaling_alpha"]:
        growth = float(config["log_scaling_alpha"])
        grown = {"query_growth": growth, "query_span": floor, "query_shift": 1}
        fields["rope"] = replace(NO_ROPE, query_floor=True, **grown)
    return fields


def _inkling_experts(config: Config, layer: int) -> dict[str, Any] | None:
    kinds = config["mlp_layer_types"]
    if len(kinds) != config["num_hidden_layers"] or set(kinds) - {"dense", "sparse"}:
        raise ValueError(
            f'mlp_layer_types {kinds} is not "dense" or "sparse" for each of '
            f"{config['num_hidden_layers']} layers"
        )
    if kinds[layer] == "dense":
        return None
    shared = config["n_shared_experts"]
    if not shared:
        raise ValueError("n_shared_experts is 0, but the router needs shared experts")
    # if dense_intermediate_size is set, intermediate_size is the size of experts
    size = "intermediate_size" if config.get("dense_intermediate_size") else "moe_intermediate_size"
    return {
        "count": config["n_routed_experts"] + shared,
        "top_k": config["num_experts_per_tok"] + shared,
        "size": config[size],
        "scoring": "sigmoid",
        "correction": True,
        "normalise": True,
        "scale": float(config["routed_scaling_factor"]),
        "always": shared,
    }


def _inkling_model_settings(config: Config) -> dict[str, Any]:
    return {
        "embedding_norm": True,
        "logit_scale": 1 / config["logits_mup_width_multiplier"],
        "real_tokens": _real_tokens(config),
        "draft_layers": config.get("num_mtp_layers") or 0,
    }


def _real_tokens(config: Config) -> int:
    """Returns the number of tokens that have logits, or 0 if all tokens have them."""
    real = config.get("unpadded_vocab_size") or 0
    return real if real < config["vocab_size"] else 0


def _inkling2_attention(config: Config, layer: int) -> dict[str, Any]:
    own = _inkling_attention(config, layer)
    full = config["layer_types"][layer] == "full_attention"
    return {
        **own,
        "scale": own["key_size"] ** -0.5,
        "distance_bias": replace(own["distance_bias"], clip=config["rel_l2_clip_threshold"]),
        "short_convs": replace(own["short_convs"], learns_factor=False, scaled=True, dynamic=full),
        "norm_limit": config["qk_l2_clip_threshold"],
        "value_norm": True,
        "output_gate": True,
        "token_sinks": True,
        "separate": full,
    }


def _inkling2_layer(config: Config, layer: int) -> dict[str, Any]:
    size = config["n_layers_per_attn_res_block"]
    full = config["layer_types"][layer] == "full_attention"
    queries = (3 if full else 1) if layer else 0
    complete = -(-layer // size)
    writes = None if layer % size else complete
    return {"depth": DepthSpec(tuple(range(complete)), writes, queries, norms=3 if full else 1)}


def _inkling2_loop_attention(config: Config, layer: int) -> dict[str, Any]:
    own = _inkling2_attention(config, layer)
    looped = config["loop_layer_index_start"] <= layer < config["loop_layer_index_end"]
    return {**own, "separate": own["separate"] or looped}


def _unroll_inkling2_loop(config: Config, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Returns the layers in execution order. Places of sums are numbered in this order: those before
    the loop, those of each pass's blocks, and those after the loop.
    """
    size = config["n_layers_per_attn_res_block"]
    start = config["loop_layer_index_start"]
    end = config["loop_layer_index_end"]
    passes = config["loop_num_passes"]
    if start % size or end % size or not start < end <= len(layers):
        raise ValueError(
            f"loop_layer_index_start {start} and loop_layer_index_end {end} don't fit {len(layers)} "
            f"layers in blocks of {size}"
        )
    first = start // size  # place of the sum with which each pass begins
    blocks = (end - start) // size
    unrolled = list(layers[:start])

    def pass_columns(number: int) -> list[int]:
        """Returns the places of the sums of a pass's blocks, in order."""
        return [first + 1 + number * blocks + i for i in range(blocks)]

    def replace_depth(
        i: int, *, before: Sequence[int], after: Sequence[int], **changes: Any
    ) -> LayerSpec:
        """Returns a layer that reads the sums `before` and the completed ones of `after`. If it
        begins a block, it writes the next of `after`.
        """
        depth = layers[i].depth
        assert depth is not None
        done = -(-(i - (start if i < end else end)) // size)
        writes = None if depth.writes_to is None else after[done]
        sources = (*before, *after[:done])
        return replace(
            layers[i], depth=replace(depth, sources=sources, writes_to=writes, **changes)
        )

    for number in range(passes):
        for i in range(start, end):
            changes: dict[str, Any] = {
                "gate_rank": config["loop_gate_rank"],
                "loop_index": i - start,
            }
            if number:
                changes["messages"] = tuple(pass_columns(number - 1))
            if number and i == start:
                changes |= {"saves_to": pass_columns(number - 1)[-1], "restarts_from": first}
            own = replace_depth(
                i, before=range(first), after=(first, *pass_columns(number)[:-1]), **changes
            )
            unrolled.append(replace(own, repeats=i) if number else own)
    seen = (*range(first + 1), *pass_columns(passes - 1)[:-1])
    later = range(first + 1 + passes * blocks, first + 1 + passes * blocks + len(layers))
    rest = (replace_depth(i, before=seen, after=later) for i in range(end, len(layers)))
    unrolled += [replace(each, stored_as=i) for i, each in enumerate(rest, end)]
    return tuple(unrolled)


def _inkling2_experts(config: Config, layer: int) -> dict[str, Any] | None:
    return {
        "count": config["n_routed_experts"],
        "size": config["moe_intermediate_size"],
        "activation": "softcapped",
        "alpha": float(config["mlp_gate_softcap"]),
        "limit": float(config["mlp_up_softcap"]),
        "scoring": "sigmoid",
        "correction": True,
        "normalise": True,
        "scale": float(config["routed_scaling_factor"]),
    }


def _inkling2_model_settings(config: Config) -> dict[str, Any]:
    return {
        "embedding_norm": True,
        "logit_softcap": config["final_logit_softcapping"],
        "real_tokens": _real_tokens(config),
    }


def _inkling2_left_out(config: Config) -> str:
    if config.get("tie_word_embeddings"):
        return "tie_word_embeddings"
    if config.get("scoring_func") not in (None, "sigmoid"):
        return "scoring_func other than sigmoid"
    if config.get("loop_config"):
        return "loop_config"
    return "" if config.get("hidden_act") in (None, "silu") else "hidden_act other than silu"


def _inkling_left_out(config: Config) -> str:
    if config.get("tie_word_embeddings"):
        return "tie_word_embeddings"
    return "shared_expert_sink false" if config.get("shared_expert_sink") is False else ""


_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
}
_QWEN = {"sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False}
_QWEN_DELTA = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_QWEN_MOE = {
    "sliding_window": 4096,
    "use_sliding_window": False,
    "decoder_sparse_step": 1,
    "norm_topk_prob": False,
}
_GRANITE = dict.fromkeys(
    ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0
)
_GLM = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
}
_MAMBA2: dict[str, Json] = {
    "hidden_act": "silu",
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
# defaults of models that have neither attention nor a limit of positions
_ALONE: dict[str, Json] = {
    "num_attention_heads": 1,
    "max_position_embeddings": 1 << 20,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
}
_NEMOTRON_NAMES = {
    role: f"mixer.{name}"
    for role, name in {
        **dict.fromkeys(("mamba_z", "mamba_x", "mamba_b", "mamba_c", "mamba_dt"), "in_proj"),
        **dict.fromkeys(("mamba_kernel_x", "mamba_kernel_b", "mamba_kernel_c"), "conv1d"),
        "mamba_a_log": "A_log",
        "mamba_dt_offset": "dt_bias",
        "mamba_d": "D",
        "mamba_norm": "norm",
        "mamba_low": "x_proj",
        "mamba_steps": "dt_proj",
        "mamba_out": "out_proj",
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "o": "o_proj",
        "up": "up_proj",
        "down": "down_proj",
        "router": "gate",
        "correction": "gate.e_score_correction_bias",
        "expert_up": "experts.{}.up_proj",
        "expert_down": "experts.{}.down_proj",
        "stacked_gate_up": "experts.up_proj",
        "stacked_down": "experts.down_proj",
        "shared_up": "shared_experts.up_proj",
        "shared_down": "shared_experts.down_proj",
    }.items()
} | {
    "input_norm": "norm",
    "mlp_norm": "norm",
    "embedding": "backbone.embeddings",
    "layers": "backbone.layers",
    "norm": "backbone.norm_f",
}
_MAMBA1: dict[str, Json] = {
    **_ALONE,
    "state_size": 16,
    "time_step_rank": "auto",
    "tie_word_embeddings": True,
}
_MAMBA1_NAMES = {**_NEMOTRON_NAMES, "mamba_dt_offset": "mixer.dt_proj.bias"}
_INKLING_KINDS = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
_INKLING_ALIASES = {
    "sliding_window": "sliding_window_size",
    "routed_scaling_factor": "route_scale",
    "conv_kernel_size": "sconv_kernel_size",
    "max_position_embeddings": "model_max_length",
}
# names in the first checkpoints, which transformers also writes
_INKLING2_NAMES = {
    "layers": "model.llm.layers",
    "embedding": "model.llm.embed",
    "embedding_norm": "model.llm.embed_norm",
    "norm": "model.llm.norm",
    "head": "model.llm.unembed",
    "last_query": "model.llm.attn_res.output_query",
    "depth_queries": "model.llm.attn_res.attn_queries.{}",
    "feed_query": "model.llm.attn_res.mlp_queries.{}",
    "input_norm": "attn_norm|q_input_norm",
    "key_input_norm": "k_input_norm",
    "value_input_norm": "v_input_norm",
    "q": "attn.wq_du",
    "k": "attn.wk_dv",
    "v": "attn.wv_dv",
    "o": "attn.wo_ud",
    "output_gating": "attn.gate_attn",
    "distance": "attn.wr_du",
    "distance_scale": "attn.rel_l2_clip.scale",
    "distance_bank": "attn.rel_logits_proj.proj",
    "query_scale": "attn.q_l2_clip.scale",
    "token_sinks": "attn.attn_sink_proj",
    "k_taps": "attn.k_sconv",
    "v_taps": "attn.v_sconv",
    "k_static": "attn.k_sconv.static_w",
    "v_static": "attn.v_sconv.static_w",
    "k_dynamic": "attn.k_sconv.weight_proj",
    "v_dynamic": "attn.v_sconv.weight_proj",
    "attention_taps": "attn_sconv",
    "mlp_taps": "mlp_sconv",
    "mlp_norm": "mlp_norm",
    "correction": "mlp.gate.bias",
    "stacked_gate_up": "mlp.experts.w13_weight",
    "stacked_down": "mlp.experts.w2_weight",
}
_INKLING2_LOOP_NAMES = {
    **_INKLING2_NAMES,
    **{
        f"{role}_message_{part}": f"controllers.{name}.{part}_weight"
        for role, name in (("q", "attn"), ("k", "k"), ("v", "v"), ("mlp", "mlp"))
        for part in ("down", "forget", "gain")
    },
    "message_queries": "model.llm.middle_cycle_cross_pass_queries",
    "kv_message_queries": "model.llm.middle_cycle_cross_pass_kv_queries",
}
_ZAMBA_MAMBA = {
    "mamba_low": "mixer.x_proj_weight",
    "mamba_steps": "mixer.dt_proj_weight",
    "mamba_dt_offset": "mixer.dt_proj_bias",
}


def _name_block_tensors(block: str, mamba: Mapping[str, str], **others: str) -> Mapping[str, str]:
    """Returns the names in a layer with a block.

    Args:
        block: module of the block.
        mamba: names in the state space's module, which is called "mixer".
        others: names in the module of the block, by role.
    """
    own = {
        "input_norm": "input_layernorm",
        **{role: f"self_attn.{role}_proj" for role in ("q", "k", "v", "o")},
        "mlp_norm": "pre_ff_layernorm",
        **{role: f"feed_forward.{role}_proj" for role in ("gate", "up", "down")},
        **others,
    }
    return {
        "beside_norm": "mamba_decoder.input_layernorm",
        **{
            role: name.replace("mixer.", "mamba_decoder.mamba.")
            for role, name in mamba.items()
            if role.startswith("mamba_")
        },
        **{role: f"{block}.{name}" for role, name in own.items()},
    }


_ZAMBA2_ADDITIONS = {
    role: f"shared_transformer.{name}"
    for role, name in {
        "q_first": "self_attn.linear_q_adapter_list.{}.0",
        "k_first": "self_attn.linear_k_adapter_list.{}.0",
        "v_first": "self_attn.linear_v_adapter_list.{}.0",
        "second_q": "self_attn.linear_q_adapter_list.{}.1",
        "second_k": "self_attn.linear_k_adapter_list.{}.1",
        "second_v": "self_attn.linear_v_adapter_list.{}.1",
        "fed_first": "feed_forward.gate_up_proj_adapter_list.{}.0",
        "second_gate": "feed_forward.gate_up_proj_adapter_list.{}.1",
        "second_up": "feed_forward.gate_up_proj_adapter_list.{}.1",
    }.items()
}
_FED_BY_NAME = {
    "gate": "feed_forward.gate_proj",
    "up": "feed_forward.up_proj",
    "down": "feed_forward.down_proj",
    "mlp_norm": "pre_ff_layernorm",
    "norm": "model.final_layernorm",
}
_LFM2: dict[str, Json] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "rope_theta": 1_000_000.0,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
    "conv_bias": False,
}
_LFM2_NAMES = {
    "input_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "q_norm": "self_attn.q_layernorm",
    "k_norm": "self_attn.k_layernorm",
    "o": "self_attn.out_proj",
    "gate": "feed_forward.w1",
    "up": "feed_forward.w3",
    "down": "feed_forward.w2",
    "norm": "model.embedding_norm",
}
_GLM_EOS = [151_329, 151_336, 151_338]
_ALL = ("attention_bias", "attention_bias", "mlp_bias")  # values of `Family.biases`
_ATTENTION = ("attention_bias", "attention_bias", False)
_NOT_SPLIT = dict.fromkeys(("expert_gate", "expert_up", "expert_down"), "")
_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_SHARED_EXPERTS = {
    "shared_gate": "mlp.shared_experts.gate_proj",
    "shared_up": "mlp.shared_experts.up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
}
_MIXTRAL = {
    "router": "block_sparse_moe.gate",
    "expert_gate": "block_sparse_moe.experts.{}.w1",
    "expert_up": "block_sparse_moe.experts.{}.w3",
    "expert_down": "block_sparse_moe.experts.{}.w2",
    "stacked_gate_up": "block_sparse_moe.experts.gate_up_proj",
    "stacked_down": "block_sparse_moe.experts.down_proj",
}
_GPT_FIELDS = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}
_KIMI_ALIASES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
_BAILING_NAMES = {
    role: f"attention.{name}"
    for role, name in {
        "q": "q_proj",
        "q_a": "q_a_proj",
        "q_a_norm": "q_a_layernorm",
        "q_b": "q_b_proj",
        "kv_a": "kv_a_proj_with_mqa",
        "kv_a_norm": "kv_a_layernorm",
        "kv_b": "kv_b_proj",
        "output_gating": "g_proj",
        "o": "dense",
        "delta_q": "q_proj",
        "delta_k": "k_proj",
        "delta_v": "v_proj",
        "delta_z": "g_proj",
        "delta_b": "b_proj",
        "delta_a": "f_proj",
        "delta_kernel_q": "q_conv1d",
        "delta_kernel_k": "k_conv1d",
        "delta_kernel_v": "v_conv1d",
        "delta_a_log": "A_log",
        "delta_dt": "dt_bias",
        "delta_norm": "o_norm",
        "delta_out": "dense",
    }.items()
} | {"embedding": "model.word_embeddings", "correction": "mlp.gate.expert_bias"}
_HUNYUAN_NORMS = {"q_norm": "self_attn.query_layernorm", "k_norm": "self_attn.key_layernorm"}
_BEFORE_FEED_FORWARD = {"mlp_norm": "pre_feedforward_layernorm"}
_MERGED_MLP = dict.fromkeys(("gate", "up"), "mlp.gate_up_proj")


def _xlstm_left_out(config: Config) -> str:
    supported = {
        "weight_mode": "single",
        "use_bias": False,
        "add_out_norm": True,
        "norm_reduction_force_float32": True,
        "inference_state_dtype": "float32",
    }
    wrong = (name for name, value in supported.items() if config.get(name, value) != value)
    name = next(wrong, None)
    return "" if name is None else f"{name} {str(config[name]).lower()}"


FAMILIES: Mapping[str, Family] = {
    "llama": Family(("LlamaForCausalLM",), biases=_ALL),
    "mistral": Family(
        ("MistralForCausalLM",), {"num_key_value_heads": 8, "sliding_window": 4096}, has_window=_every_layer,
    ),
    "qwen2": Family(
        ("Qwen2ForCausalLM",), _QWEN, biases=(True, False, False), has_window=_after_max_window_layers,
    ),
    "qwen3": Family(
        ("Qwen3ForCausalLM",), {**_QWEN, "head_dim": 128}, biases=_ATTENTION,
        qk_norm="head", has_window=_after_max_window_layers,
    ),
    "gemma2": Family(
        ("Gemma2ForCausalLM",), {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        biases=_ATTENTION, norms="both", has_window=lambda config, i: i % 2 == 0,
        attention_fields=lambda c: {**_query_scale(c), "softcap": c.get("attn_logit_softcapping")},
        model_fields=lambda c: {**_gemma_model_settings(c), "logit_softcap": c.get("final_logit_softcapping")},
        names=_BEFORE_FEED_FORWARD,
    ),
    "gemma3": Family(
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        {**_GEMMA, "vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0,
         "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6,
         "use_bidirectional_attention": False},
        biases=_ATTENTION, qk_norm="head", norms="both",
        has_window=_except_every_nth_layer("sliding_window_pattern"), layer_ropes=True, attention_fields=_query_scale,
        model_fields=lambda c: {**_gemma_model_settings(c), "logit_softcap": c.get("final_logit_softcapping")},
        names=_BEFORE_FEED_FORWARD,
    ),
    "gemma4": Family(
        ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"), GEMMA4,
        biases=_ATTENTION, qk_norm="head", norms="both", layer_ropes=True, left_out=gemma4_left_out,
        has_window=lambda c, i: gemma4_kinds(c)[i] == "sliding_attention", layer_attention=gemma4_attention_fields,
        layer_dense=gemma4_dense_fields, layer_fields=gemma4_layer_fields, model_fields=gemma4_model_fields,
        aliases={"num_experts_per_tok": "top_k_experts"}, experts_fields=gemma4_experts,
        names={**_BEFORE_FEED_FORWARD, **_NOT_SPLIT, **GEMMA4_EXPERTS},
    ),
    "phi3": Family(
        ("Phi3ForCausalLM",), {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}, has_window=_every_layer,
        rope_aliases={"su": "longrope", "yarn": "longrope"},  # names in early Phi-3 files
        names={**dict.fromkeys(("q", "k", "v"), "self_attn.qkv_proj"), **_MERGED_MLP},
    ),
    "gemma": Family(
        ("GemmaForCausalLM",),
        {"head_dim": 256, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}, biases=_ATTENTION,
        activations={"gelu": "gelu_pytorch_tanh"}, model_fields=_gemma_model_settings,
    ),
    "smollm3": Family(
        ("SmolLM3ForCausalLM",),
        {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "use_sliding_window": False,
         "no_rope_layer_interval": 4, "tie_word_embeddings": True},
        biases=_ALL, has_window=lambda c, i: not _has_rope_smollm3(c, i, None), has_rope=_has_rope_smollm3,
    ),
    "olmo2": Family(
        ("Olmo2ForCausalLM",), {"rms_norm_eps": 1e-5}, biases=_ATTENTION, qk_norm="whole", norms="after",
    ),
    "olmo3": Family(
        ("Olmo3ForCausalLM",), {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500_000.0},
        biases=_ATTENTION, qk_norm="whole", norms="after", has_window=lambda c, i: (i + 1) % 4 > 0, layer_ropes=True,
    ),
    "granite": Family(
        ("GraniteForCausalLM",), _GRANITE, biases=_ALL, attention_fields=_granite_attention_settings,
        layer_fields=_granite_layer_settings, model_fields=_granite_model_settings,
    ),
    "glm": Family(
        ("GlmForCausalLM",), {**_GLM, "eos_token_id": _GLM_EOS, "attention_bias": True},
        biases=("attention_bias", False, False), interleaved=True, names=_MERGED_MLP,
    ),
    "glm4": Family(
        ("Glm4ForCausalLM",), {**_GLM, "eos_token_id": _GLM_EOS, "attention_bias": True},
        biases=("attention_bias", False, False), norms="both", interleaved=True,
        names={**_MERGED_MLP, "attention_out_norm": "post_self_attn_layernorm", "mlp_out_norm": "post_mlp_layernorm"},
    ),
    "ministral": Family(
        ("MinistralForCausalLM",), {"num_key_value_heads": 8, "sliding_window": 4096}, has_window=_every_layer,
    ),
    "ministral3": Family(
        ("Ministral3ForCausalLM",),
        {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
         "rope_parameters": {"rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "beta_fast": 32.0,
                             "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
                             "original_max_position_embeddings": 16_384}},
        has_window=_every_layer, query_growth=True,
    ),
    "exaone4": Family(
        ("Exaone4ForCausalLM",), {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
        qk_norm="head", norms="after", has_window=_except_every_nth_layer("sliding_window_pattern"),
        has_rope=lambda c, i, window: not c.get("sliding_window") or window is not None,
    ),
    "hunyuan_v1_dense": Family(
        ("HunYuanDenseV1ForCausalLM",), {"rms_norm_eps": 1e-5}, biases=_ATTENTION, qk_norm="head",
        rope_aliases={"dynamic": "ntk"}, attention_fields=lambda c: {"norms_rotated": True}, names=_HUNYUAN_NORMS,
    ),
    "seed_oss": Family(
        ("SeedOssForCausalLM",), {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        biases=("attention_bias", "attention_out_bias", "mlp_bias"),
    ),
    "helium": Family(
        ("HeliumForCausalLM",), {"head_dim": 128, "rope_theta": 100_000.0, "rms_norm_eps": 1e-8},
        biases=("attention_bias", False, "mlp_bias"), interleaved=True,
    ),
    "ernie4_5": Family(
        ("Ernie4_5ForCausalLM",),
        {"num_key_value_heads": 2, "head_dim": 128, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5,
         "tie_word_embeddings": True},
        biases=("use_bias", "use_bias", "use_bias"), interleaved=True,
    ),
    "arcee": Family(
        ("ArceeForCausalLM",), {"hidden_act": "relu2", "rms_norm_eps": 1e-5}, biases=_ALL, gated=False,
    ),
    "starcoder2": Family(
        ("Starcoder2ForCausalLM",),
        {"num_key_value_heads": 2, "norm_epsilon": 1e-5, "use_bias": True, "hidden_act": "gelu_pytorch_tanh",
         "tie_word_embeddings": True},
        biases=("use_bias", "use_bias", "use_bias"), gated=False, has_window=_every_layer,
        model_fields=_layer_norm_settings("norm_epsilon"),
        names={"up": "mlp.c_fc", "down": "mlp.c_proj"},
    ),
    "phi": Family(
        ("PhiForCausalLM",),
        {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new"}, biases=(True, True, True),
        gated=False, attention_fields=_qk_norm_settings("qk_layernorm", "head", bias=True),
        layer_fields=lambda c, i: {"parallel": "one norm"},
        model_fields=lambda c: {**_layer_norm_settings("layer_norm_eps")(c), "head_bias": True},
        names={"o": "self_attn.dense", "up": "mlp.fc1", "down": "mlp.fc2", "norm": "model.final_layernorm",
               "q_norm": "self_attn.q_layernorm", "k_norm": "self_attn.k_layernorm"},
    ),
    "stablelm": Family(
        ("StableLmForCausalLM",),
        {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "use_qkv_bias": False, "use_parallel_residual": False},
        biases=("use_qkv_bias", False, False), attention_fields=_qk_norm_settings("qk_layernorm", "heads"),
        layer_fields=lambda c, i: {"parallel": "one norm" if c["use_parallel_residual"] else ""},
        model_fields=_layer_norm_settings("layer_norm_eps"),
        names={"q_norm": "self_attn.q_layernorm.norms.{}", "k_norm": "self_attn.k_layernorm.norms.{}"},
    ),
    "gpt_neox": Family(
        ("GPTNeoXForCausalLM",),
        {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "hidden_act": "gelu", "attention_bias": True,
         "use_parallel_residual": True},
        aliases={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        biases=("attention_bias", "attention_bias", True), gated=False, qkv_by_head=True,
        attention_fields=_neox_attention_settings,
        layer_fields=lambda c, i: {"parallel": "two norms" if c["use_parallel_residual"] else ""},
        model_fields=_layer_norm_settings("layer_norm_eps"),
        names={**dict.fromkeys(("q", "k", "v"), "attention.query_key_value"), "o": "attention.dense",
               "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h", "embedding": "gpt_neox.embed_in",
               "layers": "gpt_neox.layers", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
    ),
    "gpt2": Family(
        ("GPT2LMHeadModel",), {"layer_norm_epsilon": 1e-5, "hidden_act": "gelu_new", "tie_word_embeddings": True},
        aliases=_GPT_FIELDS, computed=_gpt_fields, biases=(True, True, True), gated=False, transposed=True,
        has_rope=lambda c, i, window: False,
        model_fields=lambda c: {**_layer_norm_settings("layer_norm_epsilon")(c),
                                "learned_positions": c["max_position_embeddings"]},
        left_out=_gpt2_left_out,
        names={**dict.fromkeys(("q", "k", "v"), "attn.c_attn"), "o": "attn.c_proj", "up": "mlp.c_fc",
               "down": "mlp.c_proj", "input_norm": "ln_1", "mlp_norm": "ln_2", "embedding": "transformer.wte",
               "position_table": "transformer.wpe", "layers": "transformer.h", "norm": "transformer.ln_f"},
    ),
    "gptj": Family(
        ("GPTJForCausalLM",), {"layer_norm_epsilon": 1e-5, "hidden_act": "gelu_new", "rotary_dim": 64},
        aliases=_GPT_FIELDS, computed=_gpt_fields, biases=(False, False, True), gated=False, interleaved=True,
        layer_fields=lambda c, i: {"parallel": "one norm"},
        model_fields=lambda c: {**_layer_norm_settings("layer_norm_epsilon")(c), "head_bias": True},
        names={"q": "attn.q_proj", "k": "attn.k_proj", "v": "attn.v_proj", "o": "attn.out_proj", "up": "mlp.fc_in",
               "down": "mlp.fc_out", "input_norm": "ln_1", "embedding": "transformer.wte", "layers": "transformer.h",
               "norm": "transformer.ln_f"},
    ),
    "opt": Family(
        ("OPTForCausalLM",),
        {"layer_norm_eps": 1e-5, "hidden_act": "relu", "enable_bias": True, "layer_norm_elementwise_affine": True,
         "tie_word_embeddings": True},
        aliases={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        biases=("enable_bias", "enable_bias", "enable_bias"), gated=False, has_rope=lambda c, i, window: False,
        model_fields=_opt_model_settings, left_out=_opt_left_out,
        names={"o": "self_attn.out_proj", "up": "fc1", "down": "fc2", "input_norm": "self_attn_layer_norm",
               "mlp_norm": "final_layer_norm", "embedding": "model.decoder.embed_tokens",
               "position_table": "model.decoder.embed_positions", "layers": "model.decoder.layers",
               "norm": "model.decoder.final_layer_norm"},
    ),
    "falcon": Family(
        ("FalconForCausalLM",),
        {"layer_norm_epsilon": 1e-5, "hidden_act": "gelu", "max_position_embeddings": 2048, "multi_query": True,
         "parallel_attn": True, "new_decoder_architecture": False, "use_bias": False, "tie_word_embeddings": True,
         "alibi": False},
        aliases={"hidden_act": "activation", "intermediate_size": "ffn_hidden_size", "use_bias": "bias"},
        computed=_falcon_fields, biases=("use_bias", "use_bias", "use_bias"), gated=False, qkv_by_head=True,
        has_rope=lambda c, i, window: not c["alibi"], attention_fields=_falcon_attention_settings,
        layer_fields=_falcon_layer_settings, model_fields=_layer_norm_settings("layer_norm_epsilon"),
        left_out=_falcon_left_out,
        names={**dict.fromkeys(("q", "k", "v"), "self_attention.query_key_value"), "o": "self_attention.dense",
               "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h", "input_norm": "input_layernorm|ln_attn",
               "mlp_norm": "post_attention_layernorm|ln_mlp", "embedding": "transformer.word_embeddings",
               "layers": "transformer.h", "norm": "transformer.ln_f"},
    ),
    "bloom": Family(
        ("BloomForCausalLM",),
        {"layer_norm_epsilon": 1e-5, "hidden_act": "gelu_new", "max_position_embeddings": 2048,
         "tie_word_embeddings": True},
        aliases={"hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
                 "max_position_embeddings": "seq_length"},
        computed=lambda c: dict.fromkeys(("intermediate_size", "own_size"), 4 * c["hidden_size"]),
        dense_size="own_size", biases=(True, True, True), gated=False, qkv_by_head=True,
        has_rope=lambda c, i, window: False,
        attention_fields=lambda c: {"slopes": _alibi_slopes(c["num_attention_heads"])},
        model_fields=lambda c: {**_layer_norm_settings("layer_norm_epsilon")(c), "embedding_norm": True},
        left_out=_bloom_left_out,
        names={**dict.fromkeys(("q", "k", "v"), "self_attention.query_key_value"), "o": "self_attention.dense",
               "up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h", "embedding": "transformer.word_embeddings",
               "embedding_norm": "transformer.word_embeddings_layernorm", "layers": "transformer.h",
               "norm": "transformer.ln_f"},
    ),
    "mpt": Family(
        ("MptForCausalLM", "MPTForCausalLM"),
        {"layer_norm_epsilon": 1e-5, "hidden_act": "gelu", "max_position_embeddings": 2048, "expansion_ratio": 4,
         "tie_word_embeddings": True},
        aliases={"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers",
                 "max_position_embeddings": "max_seq_len"},
        computed=_mpt_fields, dense_size="own_size", gated=False, has_rope=lambda c, i, window: False,
        attention_fields=_mpt_attention_settings,
        model_fields=_layer_norm_settings("layer_norm_epsilon", bias=False), left_out=_mpt_left_out,
        names={**dict.fromkeys(("q", "k", "v"), "attn.Wqkv"), "o": "attn.out_proj", "up": "ffn.up_proj",
               "down": "ffn.down_proj", "input_norm": "norm_1", "mlp_norm": "norm_2", "embedding": "transformer.wte",
               "layers": "transformer.blocks", "norm": "transformer.norm_f"},
    ),
    "apertus": Family(
        ("ApertusForCausalLM",),
        {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0,
         "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 8192}},
        biases=_ATTENTION, qk_norm="head", gated=False,
        names={"input_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"},
    ),
    "olmo": Family(
        ("OlmoForCausalLM",), {"layer_norm_eps": 1e-5}, biases=_ATTENTION, attention_fields=_clip_settings,
        model_fields=lambda c: {**_layer_norm_settings("layer_norm_eps", bias=False)(c), "norm_weight": False},
    ),
    "cohere": Family(
        ("CohereForCausalLM",),
        {"layer_norm_eps": 1e-5, "rope_theta": 500_000.0, "logit_scale": 0.0625, "tie_word_embeddings": True},
        biases=_ATTENTION, interleaved=True, attention_fields=_qk_norm_settings("use_qk_norm", "heads"),
        layer_fields=lambda c, i: {"parallel": "one norm"}, model_fields=_cohere_model_settings,
    ),
    "cohere2": Family(
        ("Cohere2ForCausalLM",),
        {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True, "sliding_window": 4096,
         "sliding_window_pattern": 4},
        biases=_ATTENTION, interleaved=True, has_window=_except_every_nth_layer("sliding_window_pattern"),
        has_rope=lambda c, i, window: window is not None, layer_fields=lambda c, i: {"parallel": "one norm"},
        model_fields=_cohere_model_settings,
    ),
    "nemotron": Family(
        ("NemotronForCausalLM",), {"norm_eps": 1e-5, "partial_rotary_factor": 0.5, "hidden_act": "relu2"},
        biases=_ALL, gated=False, model_fields=_layer_norm_settings("norm_eps", offset=1.0),
    ),
    "mixtral": Family(
        ("MixtralForCausalLM",),
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "num_local_experts": 8,
         "num_experts_per_tok": 2},
        has_window=_every_layer, experts_fields=_local_experts,
        names=_MIXTRAL,
    ),
    "qwen2_moe": Family(
        ("Qwen2MoeForCausalLM",),
        {**_QWEN_MOE, "max_window_layers": 28, "num_experts": 60, "num_experts_per_tok": 4, "qkv_bias": True,
         "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
        biases=("qkv_bias", False, False), has_window=lambda c, i: i % 2 == 0 and i < c["max_window_layers"],
        experts_fields=_qwen2_experts,
    ),
    "qwen3_moe": Family(
        ("Qwen3MoeForCausalLM",),
        {**_QWEN_MOE, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
         "moe_intermediate_size": 768},
        biases=_ATTENTION, qk_norm="head", has_window=_every_layer, experts_fields=_qwen_experts,
    ),
    "qwen3_vl_moe": Family(
        ("Qwen3VLMoeForConditionalGeneration",),
        {"num_key_value_heads": 16, "rope_theta": 500_000.0, "decoder_sparse_step": 1, "num_experts": 60,
         "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "mrope_section": [24, 20, 20],
         "mrope_interleaved": True},
        biases=_ATTENTION, qk_norm="head", experts_fields=_qwen3_vl_experts,
    ),
    "olmoe": Family(
        ("OlmoeForCausalLM",),
        {"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        biases=_ATTENTION, qk_norm="whole", attention_fields=_clip_settings, experts_fields=_olmoe_experts,
    ),
    "granitemoe": Family(
        ("GraniteMoeForCausalLM",), {**_GRANITE, "num_local_experts": 8, "num_experts_per_tok": 2}, biases=_ATTENTION,
        attention_fields=_granite_attention_settings, layer_fields=_granite_layer_settings,
        model_fields=_granite_model_settings,
        experts_fields=_local_experts,
        names={**_NOT_SPLIT, "router": "block_sparse_moe.router.layer",
               "stacked_gate_up": "block_sparse_moe.input_linear.weight",
               "stacked_down": "block_sparse_moe.output_linear.weight"},
    ),
    "gpt_oss": Family(
        ("GptOssForCausalLM",),
        {"num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5, "attention_bias": True,
         "rope_theta": 150_000.0, "num_local_experts": 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702,
         "swiglu_limit": 7.0,
         "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                             "truncate": False, "original_max_position_embeddings": 4096}},
        biases=_ATTENTION, has_window=lambda c, i: i % 2 == 0, attention_fields=lambda c: {"sinks": True},
        experts_fields=_gpt_oss_experts, experts_interleaved=True, names={"router": "mlp.router"},
    ),
    "glm4_moe": Family(
        ("Glm4MoeForCausalLM",),
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "n_routed_experts": 128,
         "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1, "n_group": 1,
         "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        biases=("attention_bias", False, False),
        attention_fields=_qk_norm_settings("use_qk_norm", "head"), experts_fields=_glm4_experts,
        model_fields=_draft_layer_settings,
        names=_SHARED_EXPERTS,
    ),
    "solar_open": Family(
        ("SolarOpenForCausalLM",),
        {"intermediate_size": 1280, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
         "rope_theta": 1_000_000.0, "n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1280,
         "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        biases=("attention_bias", False, False), experts_fields=_sigmoid_experts, names=_SHARED_EXPERTS,
    ),
    "dots1": Family(
        ("Dots1ForCausalLM",),
        {"sliding_window": 4096, "max_window_layers": 62, "moe_intermediate_size": 1408, "n_shared_experts": None,
         "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False,
         "routed_scaling_factor": 1.0},
        biases=_ATTENTION, qk_norm="head", has_window=_after_max_window_layers, experts_fields=_glm4_experts,
        names=_SHARED_EXPERTS,
    ),
    "exaone_moe": Family(
        ("ExaoneMoeForCausalLM",),
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "first_k_dense_replace": 1,
         "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8, "num_shared_experts": 1,
         "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1},
        qk_norm="head", has_window=_except_every_nth_layer("sliding_window_pattern"),
        has_rope=lambda c, i, window: not c.get("sliding_window") or window is not None,
        experts_fields=_exaone_experts, model_fields=_draft_layer_settings,
        names={**_SHARED_EXPERTS, "correction": "mlp.e_score_correction_bias"},
    ),
    "minimax_m2": Family(
        ("MiniMaxM2ForCausalLM",),
        {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5_000_000.0, "num_local_experts": 256,
         "num_experts_per_tok": 8},
        qk_norm="whole", computed=_rotary_part, experts_fields=_minimax_experts,
        names={**_MIXTRAL, "correction": "block_sparse_moe.e_score_correction_bias"},
    ),
    "hunyuan_v1_moe": Family(
        ("HunYuanMoEV1ForCausalLM",), {"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1}, biases=_ATTENTION,
        qk_norm="head", rope_aliases={"dynamic": "ntk"}, attention_fields=lambda c: {"norms_rotated": True},
        experts_fields=_hunyuan_experts,
        names={**_HUNYUAN_NORMS, "router": "mlp.gate.wg", "shared_gate": "mlp.shared_mlp.gate_proj",
               "shared_up": "mlp.shared_mlp.up_proj", "shared_down": "mlp.shared_mlp.down_proj"},
    ),
    "ernie4_5_moe": Family(
        ("Ernie4_5_MoeForCausalLM",),
        {"num_key_value_heads": 4, "rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
         "use_bias": False, "moe_intermediate_size": 1536, "moe_num_experts": 64, "num_experts_per_tok": 6,
         "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
        aliases={"num_experts_per_tok": "moe_k"}, biases=("use_bias", "use_bias", "use_bias"), interleaved=True,
        experts_fields=_ernie_experts, model_fields=_draft_layer_settings,
        names={**_SHARED_EXPERTS, "correction": "mlp.moe_statics.e_score_correction_bias[0]"},
    ),
    "afmoe": Family(
        ("AfmoeForCausalLM",),
        {"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 1024, "global_attn_every_n_layers": 4,
         "moe_intermediate_size": 1408, "num_dense_layers": 1, "num_experts": 64, "num_experts_per_tok": 6,
         "num_shared_experts": 2, "routed_scaling_factor": 1.0, "mup_enabled": False},
        aliases={"routed_scaling_factor": "route_scale"}, biases=_ATTENTION, qk_norm="head", norms="both",
        has_window=_except_every_nth_layer("global_attn_every_n_layers"),
        has_rope=lambda c, i, window: window is not None, attention_fields=lambda c: {"output_gate": True},
        experts_fields=_afmoe_experts,
        model_fields=lambda c: {"embedding_scale": math.sqrt(c["hidden_size"]) if c["mup_enabled"] else 1.0},
        names={**_SHARED_EXPERTS, "router": "mlp.router.gate", "correction": "mlp.expert_bias",
               "mlp_norm": "pre_mlp_layernorm", "mlp_out_norm": "post_mlp_layernorm"},
    ),
    "cohere2_moe": Family(
        ("Cohere2MoeForCausalLM",),
        {"layer_norm_eps": 1e-5, "head_dim": 128, "logit_scale": 0.0625, "tie_word_embeddings": True,
         "sliding_window": 4096, "sliding_window_pattern": 4, "prefix_dense_sliding_window_pattern": 1,
         "first_k_dense_replace": 0, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0,
         "shared_expert_combination_strategy": "average", "expert_selection_fn": "softmax", "norm_topk_prob": True},
        biases=_ATTENTION, interleaved=True, dense_size="prefix_dense_intermediate_size",
        has_window=_cohere2_moe_window, has_rope=_cohere2_moe_rope, layer_fields=lambda c, i: {"parallel": "one norm"},
        model_fields=_cohere2_moe_model_settings, experts_fields=_cohere2_moe_experts, names=_SHARED_EXPERTS,
    ),
    "phimoe": Family(
        ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "num_local_experts": 16, "num_experts_per_tok": 2,
         "router_jitter_noise": 0.01, "lm_head_bias": False},
        biases=_ATTENTION, has_window=_every_layer, experts_fields=_phimoe_experts,
        model_fields=lambda c: {**_layer_norm_settings("rms_norm_eps")(c), "head_bias": c["lm_head_bias"]},
        names=_MIXTRAL,
    ),
    "deepseek_v2": Family(
        ("DeepseekV2ForCausalLM",),
        {**_LATENT, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
         "first_k_dense_replace": 0, "moe_layer_freq": 1, "topk_method": "greedy", "routed_scaling_factor": 1.0},
        biases=_ATTENTION, interleaved=True, latent=True, experts_fields=_deepseek2_experts, names=_SHARED_EXPERTS,
    ),
    "deepseek_v3": Family(
        ("DeepseekV3ForCausalLM",),
        {**_LATENT, "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
         "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True,
         "routed_scaling_factor": 2.5, "rope_interleave": True},
        biases=_ATTENTION, interleaved="rope_interleave", latent=True, model_fields=_draft_layer_settings,
        experts_fields=_glm4_experts, names=_SHARED_EXPERTS,
    ),
    "glm4_moe_lite": Family(
        ("Glm4MoeLiteForCausalLM",),
        {**_LATENT, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rms_norm_eps": 1e-5,
         "n_routed_experts": 64, "n_shared_experts": 1, "moe_intermediate_size": 1536, "num_experts_per_tok": 4,
         "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
         "routed_scaling_factor": 1.8, "rope_interleave": True},
        biases=_ATTENTION, interleaved="rope_interleave", latent=True, model_fields=_draft_layer_settings,
        experts_fields=_glm4_lite_experts, names=_SHARED_EXPERTS,
    ),
    "youtu": Family(
        ("YoutuForCausalLM",), {**_LATENT, "rope_interleave": True, "tie_word_embeddings": True}, biases=_ATTENTION,
        interleaved="rope_interleave", latent=True,
    ),
    "minicpm3": Family(
        ("MiniCPM3ForCausalLM",),
        {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": None,
         "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        biases=_ALL, latent=True, layer_fields=_minicpm3_layer_settings, model_fields=_minicpm3_model_settings,
    ),
    "qwen3_next": Family(
        ("Qwen3NextForCausalLM",),
        {**_QWEN_DELTA, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
         "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "norm_topk_prob": True},
        biases=_ATTENTION, qk_norm="head", attention_fields=lambda c: {"output_gate": True},
        model_fields=_qwen_delta_model_settings, mixer=qwen_mixer, experts_fields=_qwen2_experts,
        names={**dict.fromkeys(("delta_q", "delta_k", "delta_v", "delta_z"), "linear_attn.in_proj_qkvz"),
               **dict.fromkeys(("delta_b", "delta_a"), "linear_attn.in_proj_ba"), "output_gating": "self_attn.q_proj"},
    ),
    "qwen3_5": Family(
        ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"), _QWEN_DELTA, biases=_ATTENTION, qk_norm="head",
        attention_fields=lambda c: {"output_gate": True}, model_fields=_qwen_delta_model_settings,
        mixer=qwen_mixer, names={"output_gating": "self_attn.q_proj"},
    ),
    "qwen3_5_moe": Family(
        ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
        {**_QWEN_DELTA, "intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
         "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1,
         "norm_topk_prob": True},
        biases=_ATTENTION, qk_norm="head", attention_fields=lambda c: {"output_gate": True},
        model_fields=_qwen_delta_model_settings, mixer=qwen_mixer, experts_fields=_qwen2_experts,
        names={"output_gating": "self_attn.q_proj"},
    ),
    "minimax": Family(
        ("MiniMaxForCausalLM",),
        {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "hidden_act": "silu",
         "rope_theta": 1_000_000.0, "num_local_experts": 8, "num_experts_per_tok": 2,
         **dict.fromkeys(("full_attn_alpha_factor", "full_attn_beta_factor", "linear_attn_alpha_factor",
                          "linear_attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor"), 1.0)},
        norms="residual", mixer=minimax_mixer, layer_fields=_minimax_layer_settings, left_out=_minimax_left_out,
        layer_attention=lambda c, i: {"window": c.get("sliding_window") or None},
        attention_fields=lambda c: {"output_scale": float(c["full_attn_beta_factor"])},
        experts_fields=_minimax_state_experts, names=_MIXTRAL,
    ),
    "lara_mini": Family(
        ("LaraMiniForCausalLM",),
        {"num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 131_072, "sliding_window": 512,
         "tie_word_embeddings": True, "intermediate_size": 512, "moe_intermediate_size": 512, "num_experts": 128,
         "num_experts_per_tok": 4, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1,
         "norm_topk_prob": True, "full_attention_interval": 1, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
         "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "hidden_act": "silu"},
        biases=_ATTENTION, qk_norm="head", has_window=lambda c, i: lara_kinds(c)[i] == "sliding_attention",
        has_rope=lambda c, i, window: window is not None, mixer=lara_mixer, experts_fields=_lara_experts,
        names={**{f"delta_{part}": "linear_attn.in_proj" for part in "qkvzba"}, "delta_norm": "linear_attn.out_norm"},
    ),
    "kimi_linear": Family(
        ("KimiLinearForCausalLM",),
        {**_LATENT, "q_lora_rank": None, "rms_norm_eps": 1e-5, "hidden_act": "silu", "linear_num_heads": 32,
         "max_position_embeddings": 1_048_576, "linear_head_dim": 128, "linear_conv_kernel_dim": 4,
         "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1024,
         "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
         "routed_scaling_factor": 2.446},
        aliases=_KIMI_ALIASES, computed=kimi_layer_types, biases=_ATTENTION, latent=True,
        has_rope=lambda c, i, window: False, mixer=kimi_mixer, experts_fields=_glm4_lite_experts,
        left_out=_kimi_left_out,
        # transformers saves a dense feed-forward under the name of experts
        names={**{role: f"{name}|block_sparse_moe.{name.removeprefix('mlp.')}" for role, name in (
                   ("gate", "mlp.gate_proj"), ("up", "mlp.up_proj"), ("down", "mlp.down_proj"))},
               "router": "block_sparse_moe.gate", "correction": "block_sparse_moe.gate.e_score_correction_bias",
               "expert_gate": "block_sparse_moe.experts.{}.w1", "expert_up": "block_sparse_moe.experts.{}.w3",
               "expert_down": "block_sparse_moe.experts.{}.w2",
               "stacked_gate_up": "block_sparse_moe.experts.gate_up_proj",
               "stacked_down": "block_sparse_moe.experts.down_proj",
               "shared_gate": "block_sparse_moe.shared_experts.gate_proj",
               "shared_up": "block_sparse_moe.shared_experts.up_proj",
               "shared_down": "block_sparse_moe.shared_experts.down_proj",
               "delta_q": "self_attn.q_proj", "delta_k": "self_attn.k_proj", "delta_v": "self_attn.v_proj",
               "delta_b": "self_attn.b_proj", "delta_kernel_q": "self_attn.q_conv1d",
               "delta_kernel_k": "self_attn.k_conv1d", "delta_kernel_v": "self_attn.v_conv1d",
               "delta_a_log": "self_attn.A_log[0,0,:,0]", "delta_dt": "self_attn.dt_bias",
               "delta_norm": "self_attn.o_norm", "delta_out": "self_attn.o_proj"},
    ),
    "bailing_hybrid": Family(
        ("BailingHybridForCausalLM",),
        {**_LATENT, "q_lora_rank": None, "hidden_act": "silu", "max_position_embeddings": 262_144, "head_dim": 128,
         "rope_theta": 6_000_000.0, "linear_conv_kernel_dim": 4, "full_attention_interval": 6, "kda_safe_gate": True,
         "kda_lower_bound": -5.0, "n_routed_experts": 512, "num_experts_per_tok": 8, "n_shared_experts": 1,
         "moe_intermediate_size": 768, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 2,
         "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1},
        aliases={**_KIMI_ALIASES, "linear_conv_kernel_dim": "short_conv_kernel_size",
                 "full_attention_interval": "layer_group_size", "num_nextn_predict_layers": "num_mtp_layers"},
        biases=_ATTENTION, interleaved=True, latent=True, latent_gate=True, mixer=bailing_mixer,
        experts_fields=_glm4_lite_experts, model_fields=_draft_layer_settings,
        names={**_SHARED_EXPERTS, **_BAILING_NAMES},
    ),
    "olmo_hybrid": Family(
        ("OlmoHybridForCausalLM",),
        {"full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True},
        biases=_ATTENTION, qk_norm="whole", norms="after", mixer_norms="before", mixer=olmo_mixer,
        has_rope=lambda c, i, window: (c.get("rope_parameters") or {}).get("rope_theta") is not None,
        names={"delta_q": "linear_attn.q_proj", "delta_k": "linear_attn.k_proj", "delta_v": "linear_attn.v_proj",
               "delta_z": "linear_attn.g_proj", "delta_b": "linear_attn.b_proj", "delta_a": "linear_attn.a_proj",
               "delta_norm": "linear_attn.o_norm", "delta_out": "linear_attn.o_proj",
               "delta_kernel_q": "linear_attn.q_conv1d", "delta_kernel_k": "linear_attn.k_conv1d",
               "delta_kernel_v": "linear_attn.v_conv1d", "input_norm": "input_layernorm|attention_layer_norm",
               **dict.fromkeys(("mlp_norm", "attention_out_norm"), "post_attention_layernorm|feedforward_layer_norm")},
    ),
    "bamba": Family(
        ("BambaForCausalLM",),
        {**_MAMBA2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 262_144,
         "partial_rotary_factor": 0.5},
        biases=_ALL, mixer=bamba_mixer, names=_FED_BY_NAME,
    ),
    "falcon_h1": Family(
        ("FalconH1ForCausalLM",),
        {**_MAMBA2, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
         "mamba_d_ssm": 1024, "mamba_rms_norm": False, "mamba_norm_before_gate": True, "projectors_bias": False,
         **dict.fromkeys(("lm_head_multiplier", "embedding_multiplier", "key_multiplier", "attention_in_multiplier",
                          "attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"), 1.0)},
        biases=_ALL, attention_fields=_falcon_h1_attention_settings, dense_fields=_falcon_h1_dense_settings,
        layer_fields=lambda c, i: {"beside": falcon_h1_mixer(c)},
        model_fields=lambda c: {"embedding_scale": float(c["embedding_multiplier"]),
                                "logit_scale": float(c["lm_head_multiplier"])},
        left_out=_falcon_h1_left_out, names=_FED_BY_NAME,
    ),
    "jamba": Family(
        ("JambaForCausalLM",),
        {"hidden_act": "silu", "rms_norm_eps": 1e-6, "num_key_value_heads": 8, "max_position_embeddings": 262_144,
         "num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1,
         "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
         "mamba_dt_rank": "auto", "mamba_conv_bias": True, "mamba_proj_bias": False},
        mixer=jamba_mixer, has_rope=lambda c, i, window: False, experts_fields=_jamba_experts,
        names={**_FED_BY_NAME, "mamba_dt_offset": "mamba.dt_proj.bias", "router": "feed_forward.router",
               "expert_gate": "feed_forward.experts.{}.gate_proj", "expert_up": "feed_forward.experts.{}.up_proj",
               "expert_down": "feed_forward.experts.{}.down_proj",
               "stacked_gate_up": "feed_forward.experts.gate_up_proj",
               "stacked_down": "feed_forward.experts.down_proj"},
    ),
    "granitemoehybrid": Family(
        ("GraniteMoeHybridForCausalLM",),
        {**_GRANITE, **_MAMBA2, "rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "num_local_experts": 8,
         "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "position_embedding_type": None},
        aliases={"layer_types": "layers_block_type"},
        biases=_ATTENTION, dense_size="shared_intermediate_size", mixer=granite_mixer,
        has_rope=lambda c, i, window: c.get("position_embedding_type") == "rope",
        attention_fields=_granite_attention_settings, layer_fields=_granite_layer_settings,
        model_fields=_granite_model_settings, experts_fields=_granite_hybrid_experts,
        names={**_NOT_SPLIT, "router": "block_sparse_moe.router.layer",
               "stacked_gate_up": "block_sparse_moe.input_linear.weight",
               "stacked_down": "block_sparse_moe.output_linear.weight",
               **dict.fromkeys(("gate", "up", "shared_gate", "shared_up"), "shared_mlp.input_linear"),
               **dict.fromkeys(("down", "shared_down"), "shared_mlp.output_linear")},
    ),
    "nemotron_h": Family(
        ("NemotronHForCausalLM",),
        {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
         "intermediate_size": 21504, "hidden_act": "relu2", "rms_norm_eps": 1e-5, "mamba_num_heads": 128,
         "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
         "use_conv_bias": True, "use_bias": False, "n_routed_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "n_group": 1, "topk_group": 1,
         "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        aliases={"layer_types": "layers_block_type", "hidden_act": "mlp_hidden_act",
                 "rms_norm_eps": "layer_norm_epsilon", **_NEMOTRON_ALIASES},
        computed=nemotron_layer_types, biases=_ALL, gated=False, mixer=nemotron_mixer,
        has_rope=lambda c, i, window: False, experts_fields=_nemotron_experts, left_out=_nemotron_left_out,
        has_feed_forward=lambda c, i: c["layer_types"][i] in ("mlp", "moe"),
        names=_NEMOTRON_NAMES,
    ),
    "mamba2": Family(
        ("Mamba2ForCausalLM",),
        {**_ALONE, "intermediate_size": 1, "num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128},
        aliases={"rms_norm_eps": "layer_norm_epsilon"}, mixer=mamba2_mixer,
        has_feed_forward=lambda c, i: False, names=_NEMOTRON_NAMES,
    ),
    "mamba": Family(
        ("MambaForCausalLM",), _MAMBA1,
        aliases={"rms_norm_eps": "layer_norm_epsilon"}, computed=mamba1_size, mixer=mamba1_mixer,
        has_feed_forward=lambda c, i: False, names=_MAMBA1_NAMES,
    ),
    "falcon_mamba": Family(
        ("FalconMambaForCausalLM",), {**_MAMBA1, "mixer_rms_eps": 1e-6},
        aliases={"rms_norm_eps": "layer_norm_epsilon"}, computed=mamba1_size, mixer=mamba1_mixer,
        has_feed_forward=lambda c, i: False, names=_MAMBA1_NAMES,
    ),
    "rwkv": Family(
        ("RwkvForCausalLM",),
        {**_ALONE, "hidden_act": "relu2", "rescale_every": 6, "tie_word_embeddings": False},
        aliases={"rms_norm_eps": "layer_norm_epsilon"}, computed=rwkv_size, gated=False, mixer=rwkv_mixer,
        layer_fields=rwkv_layer, dense_fields=lambda c: {"mixed": True},
        model_fields=lambda c: {"norm": "layer", "norm_bias": True, "embedding_norm": True},
        names={"embedding": "rwkv.embeddings", "embedding_norm": "rwkv.blocks.0.pre_ln", "layers": "rwkv.blocks",
               "norm": "rwkv.ln_out", "head": "head", "input_norm": "ln1", "mlp_norm": "ln2",
               "up": "feed_forward.key", "down": "feed_forward.value"},
    ),
    "xlstm": Family(
        ("xLSTMForCausalLM",),
        {**_ALONE, "num_heads": 8, "qk_dim_factor": 0.5, "v_dim_factor": 1.0, "ffn_proj_factor": 2.667,
         "ffn_round_up_to_multiple_of": 64, "gate_soft_cap": 15.0, "output_logit_soft_cap": 30.0, "norm_eps": 1e-6,
         "eps": 1e-6, "tie_word_embeddings": False},
        aliases={"hidden_size": "embedding_dim", "num_hidden_layers": "num_blocks"}, computed=xlstm_size,
        dense_size="rounded_size", mixer=xlstm_mixer, left_out=_xlstm_left_out,
        model_fields=lambda c: {"rms_eps": c["norm_eps"], "logit_softcap": c["output_logit_soft_cap"]},
        names={"embedding": "backbone.embeddings", "layers": "backbone.blocks", "norm": "backbone.out_norm",
               "input_norm": "norm_mlstm", "mlp_norm": "norm_ffn", "gate": "ffn.proj_up_gate",
               "up": "ffn.proj_up", "down": "ffn.proj_down"},
    ),
    "recurrent_gemma": Family(
        ("RecurrentGemmaForCausalLM",),
        # its config has no limit of positions
        {"max_position_embeddings": 131_072, "sliding_window": 2048, "partial_rotary_factor": 0.5, "conv1d_width": 4,
         "hidden_activation": "gelu_pytorch_tanh", "logits_soft_cap": 30.0, "tie_word_embeddings": True,
         "block_types": ["recurrent", "recurrent", "attention"]},
        aliases={"sliding_window": "attention_window_size"}, biases=("attention_bias", True, True),
        has_window=_every_layer, mixer=recurrent_gemma_mixer, dense_size="gated_size",
        computed=lambda c: {"gated_size": c["intermediate_size"] // 2}, model_fields=_recurrent_gemma_model_settings,
        names={**{role: f"temporal_block.{role}_proj" for role in "qkvo"}, "input_norm": "temporal_pre_norm",
               **{role: f"mlp_block.{role}_proj" for role in ("gate", "up", "down")}, "mlp_norm": "channel_pre_norm",
               "norm": "model.final_norm"},
    ),
    "zamba": Family(
        ("ZambaForCausalLM",),
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "gelu", "tie_word_embeddings": True,
         "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 14848, "mamba_d_state": 16,
         "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto", "mamba_conv_bias": True,
         "mamba_proj_bias": False, "hidden_mamba_act": "silu", "n_mamba_heads": 2, "attn_layer_period": 6,
         "attn_layer_offset": 4},
        aliases={"layer_types": "layers_block_type"}, computed=zamba_fields,
        attention_fields=_zamba_attention_settings, has_rope=lambda c, i, window: False, mixer=zamba_mixer,
        layer_fields=zamba_layer, has_feed_forward=_has_zamba_block, left_out=_zamba_left_out, block="shared_transf",
        names={"norm": "model.final_layernorm",
               **{role: name.replace("mixer.", "mamba.") for role, name in _ZAMBA_MAMBA.items()}},
        block_names=_name_block_tensors("shared_transf", {**_MAMBA1_NAMES, **_ZAMBA_MAMBA}),
    ),
    "zamba2": Family(
        ("Zamba2ForCausalLM",),
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "gelu", "tie_word_embeddings": True,
         "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 8,
         "time_step_min": 0.001, "add_bias_linear": False, "num_mem_blocks": 1, "adapter_rank": 128,
         "use_shared_attention_adapter": False, "use_mem_rope": False},
        aliases={"layer_types": "layers_block_type"}, computed=zamba2_fields, biases=(False, False, "add_bias_linear"),
        attention_fields=_zamba_attention_settings, has_rope=lambda c, i, window: c["use_mem_rope"],
        mixer=zamba2_mixer, layer_fields=zamba2_layer, has_feed_forward=_has_zamba_block, left_out=_zamba2_left_out,
        block="shared_transformer", names={"norm": "model.final_layernorm"},
        block_names=_name_block_tensors("shared_transformer", _NEMOTRON_NAMES, gate="feed_forward.gate_up_proj",
                                        up="feed_forward.gate_up_proj"),
        addition_names=_ZAMBA2_ADDITIONS,
    ),
    "zaya": Family(
        ("ZayaForCausalLM",),
        {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5,
         "intermediate_size": 1, "moe_intermediate_size": 2048, "num_experts": 16, "num_experts_per_tok": 1,
         "router_hidden_size": 256, "cca_time0": 2, "cca_time1": 2, "hidden_act": "silu", "lm_head_bias": False,
         "tie_word_embeddings": True, "max_position_embeddings": 131_072, "rope_theta": 5_000_000.0,
         "rope_parameters": {
             "full_attention": {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}},
        layer_kinds={"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}, layer_ropes=True,
        has_window=lambda c, i: False, attention_fields=lambda c: {"taps": (c["cca_time0"], c["cca_time1"])},
        layer_fields=lambda c, i: {"residual_weights": True}, experts_fields=_zaya_experts, left_out=_zaya_left_out,
        model_fields=lambda c: {"embedding_weights": True, "head_bias": c["lm_head_bias"]},
        names={**_NOT_SPLIT, "q": "self_attn.qkv_proj.q_proj", "k": "self_attn.qkv_proj.k_proj",
               "v": "self_attn.qkv_proj.v_proj_current", "router": "mlp.gate.router_mlp.out_proj",
               "correction": "mlp.gate.balancing_biases"},
    ),
    "inkling": Family(
        ("InklingForCausalLM",),
        {"vocab_size": 201024, "hidden_size": 6144, "num_hidden_layers": 66, "num_attention_heads": 64,
         "num_key_value_heads": 8, "head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 16,
         "swa_head_dim": 128, "sliding_window": 512, "d_rel": 16, "rel_extent": 1024, "log_scaling_alpha": 0.1,
         "max_position_embeddings": 131_072, "conv_kernel_size": 4, "intermediate_size": 24576, "hidden_act": "silu",
         "moe_intermediate_size": 3072, "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 2,
         "routed_scaling_factor": 8.0, "logits_mup_width_multiplier": 24.0, "shared_expert_sink": True,
         "bos_token_id": 1, "eos_token_id": 2},
        aliases=_INKLING_ALIASES, layer_kinds=_INKLING_KINDS, computed=_inkling_fields,
        qk_norm="head", dense_size="dense_intermediate_size", has_window=_every_layer,
        has_rope=lambda c, i, window: False, layer_attention=_inkling_attention, experts_fields=_inkling_experts,
        model_fields=_inkling_model_settings, left_out=_inkling_left_out,
        names={**_NOT_SPLIT, "embedding_norm": "model.embed_tokens.embed_norm"},
    ),
    "inkling2": Family(
        ("Inkling2ForCausalLM",),
        {"vocab_size": 201024, "unpadded_vocab_size": 200058, "hidden_size": 4608, "num_hidden_layers": 48,
         "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "swa_num_attention_heads": 48,
         "swa_num_key_value_heads": 8, "swa_head_dim": 128, "sliding_window": 1024, "d_rel": 16, "rel_extent": 1024,
         "log_scaling_n_floor": 128_000, "log_scaling_alpha": 0.1, "max_position_embeddings": 1_048_576,
         "conv_kernel_size": 4, "intermediate_size": 2304, "moe_intermediate_size": 2304, "hidden_act": "silu",
         "n_routed_experts": 384, "num_experts_per_tok": 8, "routed_scaling_factor": 8.0,
         "qk_l2_clip_threshold": 512**0.5, "rel_l2_clip_threshold": 8.0, "n_layers_per_attn_res_block": 6,
         "mlp_gate_softcap": 4.0, "mlp_up_softcap": 25.0, "final_logit_softcapping": 30.0, "scoring_func": "sigmoid",
         "eos_token_id": 200_006},
        aliases=_INKLING_ALIASES, layer_kinds=_INKLING_KINDS, computed=_inkling_fields, has_window=_every_layer,
        has_rope=lambda c, i, window: False, layer_attention=_inkling2_attention, layer_fields=_inkling2_layer,
        experts_fields=_inkling2_experts, model_fields=_inkling2_model_settings, left_out=_inkling2_left_out,
        expert_rows_alternate=True, names={**_NOT_SPLIT, **_INKLING2_NAMES},
    ),
    "inkling2_loop": Family(
        ("Inkling2LoopForCausalLM",),
        {"vocab_size": 201024, "unpadded_vocab_size": 200058, "hidden_size": 2304, "num_hidden_layers": 24,
         "num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128, "swa_num_attention_heads": 24,
         "swa_num_key_value_heads": 8, "swa_head_dim": 128, "sliding_window": 1024, "d_rel": 16, "rel_extent": 1024,
         "log_scaling_n_floor": 8192, "log_scaling_alpha": 0.1, "max_position_embeddings": 1_048_576,
         "conv_kernel_size": 4, "intermediate_size": 1152, "moe_intermediate_size": 1152, "hidden_act": "silu",
         "n_routed_experts": 128, "num_experts_per_tok": 8, "routed_scaling_factor": 8.0,
         "qk_l2_clip_threshold": 512**0.5, "rel_l2_clip_threshold": 8.0, "n_layers_per_attn_res_block": 6,
         "mlp_gate_softcap": 4.0, "mlp_up_softcap": 25.0, "final_logit_softcapping": 30.0, "scoring_func": "sigmoid",
         "loop_layer_index_start": 6, "loop_layer_index_end": 18, "loop_num_passes": 3, "loop_gate_rank": 64,
         "eos_token_id": 200_006},
        aliases=_INKLING_ALIASES, layer_kinds=_INKLING_KINDS, computed=_inkling_fields, has_window=_every_layer,
        has_rope=lambda c, i, window: False, layer_attention=_inkling2_loop_attention, layer_fields=_inkling2_layer,
        experts_fields=_inkling2_experts, model_fields=_inkling2_model_settings, left_out=_inkling2_left_out,
        unroll=_unroll_inkling2_loop, expert_rows_alternate=True, names={**_NOT_SPLIT, **_INKLING2_LOOP_NAMES},
    ),
    "llama4": Family(
        ("Llama4ForCausalLM",),
        {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
         "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1,
         "interleave_moe_layer_step": 1, "use_qk_norm": True, "no_rope_layer_interval": 4,
         "attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1},
        biases=_ATTENTION, interleaved=True, chunked=True, has_window=lambda c, i: _has_rope_smollm3(c, i, None),
        has_rope=_has_rope_smollm3,
        dense_size="intermediate_size_mlp", nope_fields=_llama4_nope_fields, experts_fields=_llama4_experts,
        attention_fields=lambda c: {"qk_norm": "head" if c["use_qk_norm"] else "", "qk_norm_weight": False,
                                    "norms_rotated": c["use_qk_norm"]},
        experts_transposed=True,
        names={**_NOT_SPLIT, "gate": "feed_forward.gate_proj", "up": "feed_forward.up_proj",
               "down": "feed_forward.down_proj", "router": "feed_forward.router",
               "stacked_gate_up": "feed_forward.experts.gate_up_proj",
               "stacked_down": "feed_forward.experts.down_proj",
               "shared_gate": "feed_forward.shared_expert.gate_proj",
               "shared_up": "feed_forward.shared_expert.up_proj",
               "shared_down": "feed_forward.shared_expert.down_proj"},
    ),
    "lfm2": Family(
        ("Lfm2ForCausalLM",),
        {**_LFM2, "block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256},
        aliases={"intermediate_size": "block_ff_dim", "tie_word_embeddings": "tie_embedding"}, qk_norm="head",
        dense_size="adjusted_ff_dim", computed=_lfm2_fields, mixer=lfm2_mixer,
        model_fields=lambda c: {"rms_eps": c["norm_eps"]}, names=_LFM2_NAMES,
    ),
    "lfm3": Family(
        ("Lfm3ForCausalLM",),
        {**_LFM2, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "conv_L_cache": 7,
         "sliding_window": 256, "use_sandwich_norm": True, "use_attention_gate": True,
         "rope_parameters": {
             "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
             "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}}},
        biases=_ATTENTION, qk_norm="head", layer_ropes=True, mixer=lfm3_mixer,
        has_window=lambda c, i: lfm3_kinds(c)[i] == "sliding_attention",
        attention_fields=lambda c: {"output_gate": c["use_attention_gate"], "gate_by_head": True},
        layer_fields=lambda c, i: {"norms": "both" if c["use_sandwich_norm"] else "before"},
        model_fields=lambda c: {"rms_eps": c["norm_eps"]},
        names={"input_norm": "operator_norm", "attention_out_norm": "post_operator_norm", "mlp_norm": "ffn_norm",
               "mlp_out_norm": "post_ffn_norm", "gate": "feed_forward.w1", "up": "feed_forward.w3",
               "down": "feed_forward.w2", "norm": "model.embedding_norm"},
    ),
    "lfm2_moe": Family(
        ("Lfm2MoeForCausalLM",),
        {**_LFM2, "moe_intermediate_size": 1792, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
         "use_expert_bias": True, "routed_scaling_factor": 1.0, "norm_topk_prob": True},
        aliases={"tie_word_embeddings": "tie_embedding"}, qk_norm="head", mixer=lfm2_mixer,
        experts_fields=_lfm2_experts, model_fields=lambda c: {"rms_eps": c["norm_eps"]},
        names={**_LFM2_NAMES, "router": "feed_forward.gate", "correction": "feed_forward.expert_bias",
               "expert_gate": "feed_forward.experts.{}.w1", "expert_up": "feed_forward.experts.{}.w3",
               "expert_down": "feed_forward.experts.{}.w2", "stacked_gate_up": "feed_forward.experts.gate_up_proj",
               "stacked_down": "feed_forward.experts.down_proj"},
    ),
}  # fmt: skip
ARCHITECTURES = {name: family for family, row in FAMILIES.items() for name in row.architectures}
# Models with an encoder of images or sounds whose decoder is of the family that `text_config`
# names.
WITH_ENCODER = (
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "VoxtralForConditionalGeneration",
)
_QWEN2_VL = {"rms_norm_eps": 1e-5, "mrope_section": [16, 24, 24]}
# Types of decoders in these models -> family, and values of fields that a config may omit.
TEXT_PARTS: Mapping[str, tuple[str, Config]] = {
    "llama": ("llama", {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "max_position_embeddings": 2048, "vocab_size": 32000,
    }),  # sizes that LLaVA's first configs omit
    "qwen2": ("qwen2", {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    }),  # sizes that Qwen2-Audio's config omits
    "mistral": ("mistral", {"num_attention_heads": 32}),  # which Pixtral's config omits
    "qwen3_vl_text": ("qwen3", {"mrope_section": [24, 20, 20], "mrope_interleaved": True}),
    # Early configs of Qwen2-VL and Qwen2.5-VL have the decoder's fields at the top level.
    **dict.fromkeys(("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"), ("qwen2", _QWEN2_VL)),
}  # fmt: skip
