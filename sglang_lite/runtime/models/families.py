"""Families of models: how each one's config is read, and what its tensors are called. A new family is one more row.

A row says what differs from Llama. `read_config.py` reads what it says; `parameters.py` has the names of Llama's tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from sglang_lite.runtime.models.config_fields import Json
from sglang_lite.runtime.models.spec import ExpertsSpec

Config: TypeAlias = Mapping[str, Json]
Changes: TypeAlias = Callable[[Config], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table.

    Attributes:
        architectures: as `config.json` names them.
        defaults: what transformers takes a field to be that a config leaves out; the hub's configs do leave out. One
            that has "use_sliding_window" has windows only where that is true.
        biases: of queries, keys and values; of attention's output; of the feed-forward. A constant, or a field's name.
        slides: the layers that have a window, where the config has no `layer_types`; None: no layer has one.
        turns: the layers whose queries and keys are turned by their positions.
        interleaved: pairs that are turned together lie side by side.
        layer_ropes: layers with a window have rope parameters of their own.
        rope_aliases: types of rope under other names.
        activations: of which the name in a config means another one.
        attention, layer, model: further fields of AttentionSpec, LayerSpec and ModelSpec.
        experts: those of a layer; None where it has one feed-forward.
        experts_interleaved: in stacks of experts' matrices inputs lie before outputs, and a gate beside each up.
        names: tensors that are called differently, by the roles of `parameters.py`; "": there is none of that name.
    """

    architectures: tuple[str, ...]
    defaults: Mapping[str, Json] = field(default_factory=dict)
    biases: tuple[bool | str, bool | str, bool | str] = (False, False, False)
    qk_norm: Literal["", "head", "whole"] = ""
    norms: Literal["before", "after", "both"] = "before"
    slides: Callable[[Config, int], bool] | None = None
    turns: Callable[[Config, int], bool] = lambda config, layer: True
    interleaved: bool = False
    layer_ropes: bool = False
    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=dict)
    attention: Changes = lambda config: {}
    layer: Changes = lambda config: {}
    model: Changes = lambda config: {}
    experts: Callable[[Config, int], ExpertsSpec | None] = lambda config, layer: None
    experts_interleaved: bool = False
    names: Mapping[str, str] = field(default_factory=dict)


def _always(config: Config, layer: int) -> bool:
    return True


def _after_max_window_layers(config: Config, layer: int) -> bool:
    return layer >= int(config["max_window_layers"])


def _but_each(field: str) -> Callable[[Config, int], bool]:
    """True but for the last of each so many layers as a field says."""
    return lambda config, layer: (layer + 1) % int(config[field]) > 0


def _scalar(config: Config) -> dict[str, Any]:
    return {"scale": config["query_pre_attn_scalar"] ** -0.5}


def _gemma_model(config: Config) -> dict[str, Any]:
    return {"norm_offset": 1.0, "embedding_scale": math.sqrt(config["hidden_size"])}


_GEMMA = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_QWEN = {"sliding_window": 4096, "max_window_layers": 28, "use_sliding_window": False}
_BEFORE_FEED_FORWARD = {"mlp_norm": "pre_feedforward_layernorm"}
_MERGED_MLP = dict.fromkeys(("gate", "up"), "mlp.gate_up_proj")

FAMILIES: Mapping[str, Family] = {
    "llama": Family(("LlamaForCausalLM",), biases=("attention_bias", "attention_bias", "mlp_bias")),
    "mistral": Family(
        ("MistralForCausalLM",), {"num_key_value_heads": 8, "sliding_window": 4096}, slides=_always,
    ),
    "qwen2": Family(
        ("Qwen2ForCausalLM",), _QWEN, biases=(True, False, False), slides=_after_max_window_layers,
    ),
    "qwen3": Family(
        ("Qwen3ForCausalLM",), {**_QWEN, "head_dim": 128}, biases=("attention_bias", "attention_bias", False),
        qk_norm="head", slides=_after_max_window_layers,
    ),
    "gemma2": Family(
        ("Gemma2ForCausalLM",), {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        biases=("attention_bias", "attention_bias", False), norms="both", slides=lambda config, i: i % 2 == 0,
        attention=lambda c: {**_scalar(c), "softcap": c.get("attn_logit_softcapping")},
        model=lambda c: {**_gemma_model(c), "logit_softcap": c.get("final_logit_softcapping")},
        names=_BEFORE_FEED_FORWARD,
    ),
    "gemma3": Family(
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        {**_GEMMA, "vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0,
         "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6},
        biases=("attention_bias", "attention_bias", False), qk_norm="head", norms="both",
        slides=_but_each("sliding_window_pattern"), layer_ropes=True, attention=_scalar,
        model=lambda c: {**_gemma_model(c), "logit_softcap": c.get("final_logit_softcapping")},
        names=_BEFORE_FEED_FORWARD,
    ),
    "phi3": Family(
        ("Phi3ForCausalLM",), {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}, slides=_always,
        rope_aliases={"su": "longrope", "yarn": "longrope"},  # what early Phi-3 files call it
        names={**dict.fromkeys(("q", "k", "v"), "self_attn.qkv_proj"), **_MERGED_MLP},
    ),
}  # fmt: skip
ARCHITECTURES = {name: family for family, row in FAMILIES.items() for name in row.architectures}
