"""Converts GGUF metadata to the config that the model's Hugging Face folder would have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models import config_fields
from sglang_lite.runtime.models.config_fields import Json
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.models.spec import AttentionSpec, LayerSpec, ModelSpec

# value of a key, given without the architecture's prefix; None if missing
Value: TypeAlias = Callable[[str], Json]


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """Row of the table: an architecture of GGUF files.

    Attributes:
        architecture: name of the architecture in `config.json`.
        required_keys: config field -> required metadata key, without the architecture's prefix.
        constants: config fields that have no key because llama.cpp hard-codes them, with their
            values.
        optional_fields: function that returns further config fields; takes a lookup of optional
            keys.
        interleaved: whether the file orders rows of queries and keys so that rotary pairs are
            adjacent.
        shifted_norms: whether norm weights in the file already include the 1 that the model adds to
            them.
        hidden_scaled_layers: layer count of the one model size that scales attention scores by
            hidden size / heads, not by the head size; None if the family has no such size.
        sigmoid_architecture: name of the architecture for files whose experts are scored by
            sigmoids; "" for none.
    """

    architecture: str
    required_keys: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Json] = field(default_factory=dict)
    optional_fields: Callable[[Value], dict[str, Any]] = lambda value: {}
    interleaved: bool = False
    shifted_norms: bool = False
    hidden_scaled_layers: int | None = None
    sigmoid_architecture: str = ""


def _read_exaone4_settings(value: Value) -> dict[str, Any]:
    window = value("attention.sliding_window")
    pattern = value("attention.sliding_window_pattern")
    if not isinstance(pattern, list):
        return {"sliding_window": window}
    kinds = ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    return {"sliding_window": window, "layer_types": kinds if window else None}


def _read_olmo_settings(value: Value) -> dict[str, Any]:
    return {"clip_qkv": value("attention.clamp_kqv")}


def _read_deepseek2_settings(value: Value) -> dict[str, Any]:
    groups = value("expert_group_count")
    return {
        "q_lora_rank": value("attention.q_lora_rank"),
        "qk_nope_head_dim": value("attention.key_length_mla") - value("rope.dimension_count"),
        "head_dim": None,
        "partial_rotary_factor": 1.0,
        "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
        "norm_topk_prob": bool(value("expert_weights_norm")),
        "routed_scaling_factor": value("expert_weights_scale") or 1.0,
    }


def _read_lfm2_settings(value: Value) -> dict[str, Any]:
    heads = value("attention.head_count_kv")  # of each layer, 0 without attention
    heads = heads if isinstance(heads, list) else [heads] * value("block_count")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
    }


_SIGMOID = 2  # llama.cpp's code for sigmoid scoring
_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_LAYER_NORM = {"layer_norm_eps": "attention.layer_norm_epsilon"}
_WINDOW = {"sliding_window": "attention.sliding_window"}
FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", interleaved=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen2moe": GgufFamily(
        "Qwen2MoeForCausalLM", {**_EXPERTS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
    ),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", _EXPERTS, {"norm_topk_prob": True}),
    "olmo2": GgufFamily("Olmo2ForCausalLM"),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", interleaved=True),
    "granite": GgufFamily(
        "GraniteForCausalLM",
        {"attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
         "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale"},
        interleaved=True,
    ),
    "gemma": GgufFamily("GemmaForCausalLM", shifted_norms=True),
    "gemma2": GgufFamily(
        "Gemma2ForCausalLM",
        {**_WINDOW, "attn_logit_softcapping": "attn_logit_softcapping",
         "final_logit_softcapping": "final_logit_softcapping"},
        shifted_norms=True, hidden_scaled_layers=46,
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM", _WINDOW, {"sliding_window_pattern": 6}, shifted_norms=True, hidden_scaled_layers=62,
    ),
    "phi3": GgufFamily(
        "Phi3ForCausalLM", {"original_max_position_embeddings": "rope.scaling.original_context_length"},
        optional_fields=lambda value: {"sliding_window": value("attention.sliding_window")},
    ),
    "glm4": GgufFamily("Glm4ForCausalLM"),
    "exaone4": GgufFamily("Exaone4ForCausalLM", optional_fields=_read_exaone4_settings),
    "seed_oss": GgufFamily("SeedOssForCausalLM"),
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM"),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        {**_WINDOW, "num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
         "intermediate_size": "expert_feed_forward_length"},
    ),
    "command-r": GgufFamily("CohereForCausalLM", {**_LAYER_NORM, "logit_scale": "logit_scale"}),
    "cohere2": GgufFamily(
        "Cohere2ForCausalLM", {**_LAYER_NORM, **_WINDOW, "logit_scale": "logit_scale"}, {"sliding_window_pattern": 4},
    ),
    "starcoder2": GgufFamily("Starcoder2ForCausalLM", {"norm_epsilon": _LAYER_NORM["layer_norm_eps"]}),
    "stablelm": GgufFamily(
        "StableLmForCausalLM", {**_LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
    ),
    "phi2": GgufFamily("PhiForCausalLM", _LAYER_NORM),
    "gptneox": GgufFamily("GPTNeoXForCausalLM", {**_LAYER_NORM, "use_parallel_residual": "use_parallel_residual"}),
    "nemotron": GgufFamily("NemotronForCausalLM", {"norm_eps": _LAYER_NORM["layer_norm_eps"]}, shifted_norms=True),
    "olmo": GgufFamily("OlmoForCausalLM", _LAYER_NORM, optional_fields=_read_olmo_settings, interleaved=True),
    "lfm2": GgufFamily(
        "Lfm2ForCausalLM",
        {"conv_L_cache": "shortconv.l_cache", "norm_eps": "attention.layer_norm_rms_epsilon"},
        {"block_auto_adjust_ff_dim": False}, optional_fields=_read_lfm2_settings,
    ),
    "deepseek2": GgufFamily(
        "DeepseekV2ForCausalLM",
        {"n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
         "moe_intermediate_size": "expert_feed_forward_length", "n_shared_experts": "expert_shared_count",
         "n_group": "expert_group_count", "topk_group": "expert_group_used_count",
         "first_k_dense_replace": "leading_dense_block_count", "kv_lora_rank": "attention.kv_lora_rank",
         "qk_rope_head_dim": "rope.dimension_count", "v_head_dim": "attention.value_length_mla",
         "qk_nope_head_dim": "attention.key_length_mla"},
        optional_fields=_read_deepseek2_settings, sigmoid_architecture="DeepseekV3ForCausalLM",
    ),
}  # fmt: skip


def spec_from_gguf(metadata: Mapping[str, Json], tensors: frozenset[str], source: str) -> ModelSpec:
    """Returns the specification of a decoder from a GGUF file's metadata.

    Args:
        metadata: metadata keys and values.
        tensors: names of the file's tensors; without `output.weight`, embeddings are tied.
        source: name of the file, for messages.

    Raises:
        ModelError: the architecture or an option is not supported, or a key is missing.
    """
    if metadata.get("general.type") == "adapter":
        raise ModelError(
            f"{source}: the file is an adapter (LoRA). Adapters are not supported yet.",
            hint="Merge it into its base model with llama.cpp's llama-export-lora.",
        )
    arch = metadata.get("general.architecture")
    config_fields.check(metadata, config_fields.GGUF, source, prefix=str(arch))
    if not isinstance(arch, str) or arch not in FAMILIES:
        raise ModelError(
            f"{source}: GGUF architecture {arch!r} is not supported.",
            hint=f"Supported: {', '.join(FAMILIES)}.",
        )
    family = FAMILIES[arch]
    _check_supported(metadata, tensors, arch, source)
    try:
        config = _build_config(
            family, lambda key: metadata[f"{arch}.{key}"], metadata, arch, source
        )
    except KeyError as error:
        raise ModelError(
            f"{source}: the metadata key {error} is missing.",
            hint="Fetch the file again, or use the HF folder.",
        ) from error
    if metadata.get(f"{arch}.attention.sliding_window") and config.get("sliding_window") is None:
        raise ModelError(
            f"{source}: {arch} with a sliding window is not supported.", hint="Use the HF folder."
        )
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["use_qk_norm"] = config["qk_layernorm"] = "blk.0.attn_q_norm.weight" in tensors
    spec = spec_from_config(config, source)
    bias = not {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}.isdisjoint(tensors)
    layers = tuple(_with_qkv_bias(layer, bias) for layer in spec.layers)
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    return replace(
        spec,
        layers=layers,
        norm_offset=0.0 if family.shifted_norms else spec.norm_offset,
        eos_ids=() if eos is None else (eos,),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _check_supported(
    metadata: Mapping[str, Json], tensors: frozenset[str], arch: str, source: str
) -> None:
    """Raises ModelError if the file has tensors or options that are not supported."""
    if any(name.startswith("rope_factors_") for name in tensors):
        raise ModelError(
            f"{source}: longrope factors in a GGUF file are not supported.",
            hint="Use the HF folder.",
        )
    if metadata.get(f"{arch}.nextn_predict_layers"):
        raise ModelError(
            f"{source}: layers that draft tokens are not supported here.", hint="Use the HF folder."
        )
    if "blk.0.attn_kv_b.weight" in tensors:
        raise ModelError(
            f"{source}: latent attention as older converters wrote it is not supported.",
            hint="Take a newer file, or the HF folder.",
        )


def _with_qkv_bias(layer: LayerSpec, bias: bool) -> LayerSpec:
    if not isinstance(layer.attention, AttentionSpec):
        return layer
    return replace(layer, attention=replace(layer.attention, qkv_bias=bias))


def _build_config(
    family: GgufFamily,
    value: Callable[[str], Json],
    metadata: Mapping[str, Json],
    arch: str,
    source: str,
) -> dict[str, Any]:
    """Returns the config that the model's Hugging Face folder would have. Raises KeyError if a
    metadata key is missing.
    """
    heads = value("attention.head_count")
    hidden = value("embedding_length")
    head_dim = metadata.get(f"{arch}.attention.key_length", hidden // heads)
    rotary = metadata.get(f"{arch}.rope.dimension_count", head_dim)
    if head_dim < 1 or rotary % 2 or rotary > head_dim:
        raise ModelError(
            f"{source}: `{arch}.rope.dimension_count` is {rotary}: it must be an even number of at most "
            f"`{arch}.attention.key_length`, which is {head_dim}.",
            hint="Fetch the file again, or use the HF folder.",
        )
    layers = value("block_count")
    scalar = hidden // heads if layers == family.hidden_scaled_layers else head_dim
    layer_norm = _LAYER_NORM["layer_norm_eps"] in family.required_keys.values()
    sigmoid = metadata.get(f"{arch}.expert_gating_func") == _SIGMOID
    return {
        "architectures": [
            family.sigmoid_architecture
            if sigmoid and family.sigmoid_architecture
            else family.architecture
        ],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        **({} if layer_norm else {"rms_norm_eps": value("attention.layer_norm_rms_epsilon")}),
        "query_pre_attn_scalar": scalar,
        "eos_token_id": None,  # read from the tokenizer's keys
        "partial_rotary_factor": rotary / head_dim,
        **_rope_settings(metadata, arch, source),
        **{name: value(key) for name, key in family.required_keys.items()},
        **family.optional_fields(lambda key: metadata.get(f"{arch}.{key}")),
        **family.constants,
    }


def _rope_settings(metadata: Mapping[str, Json], arch: str, source: str) -> dict[str, Any]:
    def value(key: str) -> Json:
        return metadata.get(f"{arch}.rope.{key}")

    kind = value("scaling.type") or "none"
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(
            f"{source}: GGUF rope scaling {kind!r} is not supported.", hint="Use the HF folder."
        )
    theta = value("freq_base")
    found: dict[str, Any] = {} if theta is None else {"rope_theta": theta}
    if kind == "linear":
        found["rope_scaling"] = {
            "rope_type": "linear",
            "factor": metadata[f"{arch}.rope.scaling.factor"],
        }
    if kind == "yarn":
        found["rope_scaling"] = {
            name: number
            for name, number in _yarn_settings(value, arch, source).items()
            if number is not None
        }
    return found


def _yarn_settings(value: Value, arch: str, source: str) -> dict[str, Any]:
    if value("scaling.yarn_ext_factor") not in (None, 1.0):
        raise ModelError(
            f"{source}: `{arch}.rope.scaling.yarn_ext_factor` is not supported.",
            hint="Use the HF folder.",
        )
    weight = value("scaling.yarn_log_multiplier")
    if weight is not None and arch != "deepseek2":
        raise ModelError(
            f"{source}: `{arch}.rope.scaling.yarn_log_multiplier` is not supported.",
            hint="Use the HF folder.",
        )
    weight = None if weight is None else weight / 0.1  # converters store it times 0.1
    return {
        "rope_type": "yarn",
        "factor": value("scaling.factor"),
        "original_max_position_embeddings": value("scaling.original_context_length"),
        "attention_factor": value("scaling.yarn_attn_factor"),
        "beta_fast": value("scaling.yarn_beta_fast"),
        "beta_slow": value("scaling.yarn_beta_slow"),
        "mscale": weight,
        "mscale_all_dim": weight,
    }
