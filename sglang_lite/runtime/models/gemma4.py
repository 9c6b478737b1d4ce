"""Functions for Gemma 4's row of `families.py`, which read from a config how its layers differ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sglang_lite.runtime.models.config_fields import Config, Json

_WINDOWED = "sliding_attention"
_FULL = "full_attention"
# values of fields that a config may omit
GEMMA4: Mapping[str, Json] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "use_bidirectional_attention": None,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_parameters": {
        _WINDOWED: {"rope_type": "default", "rope_theta": 10_000.0},
        _FULL: {
            "rope_type": "proportional",
            "rope_theta": 1_000_000.0,
            "partial_rotary_factor": 0.25,
        },
    },
}
GEMMA4_EXPERTS = {
    "router": "router.proj",
    "stacked_gate_up": "experts.gate_up_proj",
    "stacked_down": "experts.down_proj",
    "shared_gate": "mlp.gate_proj",
    "shared_up": "mlp.up_proj",
    "shared_down": "mlp.down_proj",
}
_OF_A_LAYER = {"head_dim", "num_key_value_heads"}  # what `per_layer_config` may change


def gemma4_kinds(config: Config) -> list[str]:
    """Returns the type of each layer."""
    count = config["num_hidden_layers"]
    kinds = [_WINDOWED if (i + 1) % 6 else _FULL for i in range(count - 1)]
    return config.get("layer_types") or [*kinds, _FULL]


def gemma4_attention_fields(config: Config, layer: int) -> dict[str, Any]:  # fields of any type
    """Returns fields of AttentionSpec for a layer. Layers without a window have another number and
    size of heads, and may have no value projection.
    """
    full = gemma4_kinds(config)[layer] == _FULL
    heads = config["num_attention_heads"]
    kv_heads, size = _head_sizes(config, layer)
    source = _find_source(config, layer)
    if source is not None and _head_sizes(config, source) != (kv_heads, size):
        raise ValueError(f"layer {layer} reads the keys of layer {source}, whose heads differ")
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads can't share {kv_heads} key-value heads")
    shared = bool(config["attention_k_eq_v"]) and full
    return {
        "kv_heads": kv_heads,
        "key_size": size,
        "value_size": size,
        "scale": 1.0,
        "value_norm": True,
        "keys_as_values": shared,
        "keys_of": source,
    }


def _head_sizes(config: Config, layer: int) -> tuple[int, int]:
    """Returns a layer's number of key-value heads, and the size of its heads."""
    own = _own_fields(config, layer)
    return (
        own.get("num_key_value_heads") or config["num_key_value_heads"],
        own.get("head_dim") or config["head_dim"],
    )


def _find_source(config: Config, layer: int) -> int | None:
    """Returns the layer whose keys and values a layer reads, or None if it has its own. The model's
    last layers have none: each reads those of the last layer of its type that has some.
    """
    kinds = gemma4_kinds(config)
    own = len(kinds) - int(config["num_kv_shared_layers"])
    if layer < own:
        return None
    sources = [i for i in range(max(own, 0)) if kinds[i] == kinds[layer]]
    if not sources:
        raise ValueError(f"num_kv_shared_layers leaves no layer of {kinds[layer]} with keys")
    return sources[-1]


def gemma4_dense_fields(config: Config, layer: int) -> dict[str, Any]:  # fields of any type
    """Returns fields of DenseSpec for a layer. In some models, layers that read another layer's
    keys are twice as wide.
    """
    wide = config["use_double_wide_mlp"] and _find_source(config, layer) is not None
    return {"size": 2 * config["intermediate_size"]} if wide else {}


def gemma4_layer_fields(config: Config, layer: int) -> dict[str, Any]:  # fields of any type
    """Returns fields of LayerSpec."""
    return {"scaled": True, "input_size": config["hidden_size_per_layer_input"]}


def gemma4_model_fields(config: Config) -> dict[str, Any]:  # fields of any type
    """Returns fields of ModelSpec."""
    tokens = config["vocab_size_per_layer_input"] if config["hidden_size_per_layer_input"] else 0
    if 0 < tokens < config["vocab_size"]:
        raise ValueError(f"vocab_size_per_layer_input {tokens} is below vocab_size")
    return {
        "embedding_scale": math.sqrt(config["hidden_size"]),
        "logit_softcap": config.get("final_logit_softcapping"),
        "layer_input_tokens": tokens,
    }


def _own_fields(config: Config, layer: int) -> Mapping[str, Any]:
    """Returns the config fields that have other values for this layer."""
    by_layer = config.get("per_layer_config")
    if by_layer is not None:
        return by_layer.get(str(layer)) or {}
    if gemma4_kinds(config)[layer] != _FULL:
        return {}
    shared = config.get("num_global_key_value_heads") if config["attention_k_eq_v"] else None
    return {"head_dim": config["global_head_dim"], "num_key_value_heads": shared}


def gemma4_experts(config: Config, layer: int) -> dict[str, Any] | None:  # fields of any type
    """Returns fields of ExpertsSpec, or None without experts. The dense feed-forward beside the
    experts becomes their shared expert.
    """
    if not config["enable_moe_block"]:
        return None
    return {
        "count": config["num_experts"],
        "size": config["moe_intermediate_size"],
        "normalise": True,
        "shared_size": gemma4_dense_fields(config, layer).get("size", config["intermediate_size"]),
        "apart": True,
        "expert_scales": True,
    }


def gemma4_left_out(config: Config) -> str:
    """Names a feature that a config requests and the code here does not support, or returns "". The
    config may be invalid, as it has not been checked yet.
    """
    inner = config.get("text_config")
    text: Mapping[str, Json] = {**(inner if isinstance(inner, Mapping) else {}), **config}
    if text.get("use_bidirectional_attention") == "all":
        return 'use_bidirectional_attention "all"'
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds and kinds[-1] == _WINDOWED:
        return "layer_types that end with sliding_attention"
    return _explain_own_fields(text.get("per_layer_config"))


def _explain_own_fields(by_layer: Json) -> str:
    if by_layer is None:
        return ""
    fields = list(by_layer.values()) if isinstance(by_layer, Mapping) else [by_layer]
    for field in fields:
        if not isinstance(field, Mapping):
            return "per_layer_config without the fields of layers"
        if others := sorted(set(field) - _OF_A_LAYER):
            return f"per_layer_config with {', '.join(others)}"
        if not all(type(value) is int and 0 < value <= 1 << 16 for value in field.values()):
            return "per_layer_config with other values than numbers"
    return ""
