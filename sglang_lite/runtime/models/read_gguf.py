"""Reading of a GGUF file's metadata: as the config that the model's Hugging Face folder would have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models import config_fields
from sglang_lite.runtime.models.config_fields import Json
from sglang_lite.runtime.models.read_config import spec_from_config
from sglang_lite.runtime.models.spec import AttentionSpec, LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A row of the table: an architecture of GGUF files.

    Attributes:
        architecture: that `config.json` names.
        more: fields of the config by keys of the metadata, which go without the architecture's name.
        fixed: fields of the config that llama.cpp takes for granted.
        interleaved: rows of queries and keys lie for rotary pairs side by side.
        shifted_norms: norms are stored with the 1 that the model adds to them.
        wide: number of layers of that one size whose scores are scaled by the share of a head in the hidden state, not
            by the size of a head.
    """

    architecture: str
    more: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Json] = field(default_factory=dict)
    interleaved: bool = False
    shifted_norms: bool = False
    wide: int | None = None


_EXPERTS = {
    "num_experts": "expert_count", "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}  # fmt: skip
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
        {"sliding_window": "attention.sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
         "final_logit_softcapping": "final_logit_softcapping"},
        shifted_norms=True, wide=46,
    ),
    "gemma3": GgufFamily(
        "Gemma3ForCausalLM", {"sliding_window": "attention.sliding_window"}, {"sliding_window_pattern": 6},
        shifted_norms=True, wide=62,
    ),
}  # fmt: skip


def spec_from_gguf(metadata: Mapping[str, Json], tensors: frozenset[str], source: str) -> ModelSpec:
    """Reads a GGUF file's metadata.

    Args:
        metadata: key to value.
        tensors: the names of the file's tensors (a missing `output.weight` means tied embeddings).
        source: the file's name, for messages.

    Raises:
        ModelError: an architecture that is not supported, or a key that is missing.
    """
    arch = metadata.get("general.architecture")
    config_fields.check(metadata, config_fields.GGUF, source, prefix=str(arch))
    if not isinstance(arch, str) or arch not in FAMILIES:
        raise ModelError(
            f"{source}: GGUF architecture {arch!r} is not supported.", hint=f"Supported: {', '.join(FAMILIES)}."
        )
    family = FAMILIES[arch]
    if "attention.sliding_window" not in family.more.values() and metadata.get(f"{arch}.attention.sliding_window"):
        raise ModelError(f"{source}: {arch} with a sliding window is not supported.", hint="Use the HF folder.")
    try:
        config = _config(family, lambda key: metadata[f"{arch}.{key}"], metadata, arch, source)
    except KeyError as error:
        raise ModelError(f"{source}: the metadata key {error} is missing.") from error
    config["tie_word_embeddings"] = "output.weight" not in tensors
    spec = spec_from_config(config, source)
    layers = tuple(_with_bias(layer, "blk.0.attn_q.bias" in tensors) for layer in spec.layers)
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    return replace(
        spec, layers=layers, norm_offset=0.0 if family.shifted_norms else spec.norm_offset,
        eos_ids=() if eos is None else (eos,), bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )  # fmt: skip


def _with_bias(layer: LayerSpec, bias: bool) -> LayerSpec:
    assert isinstance(layer.attention, AttentionSpec)
    return replace(layer, attention=replace(layer.attention, qkv_bias=bias))


def _config(
    family: GgufFamily, value: Callable[[str], Json], metadata: Mapping[str, Json], arch: str, source: str
) -> dict[str, Any]:
    """The config that a Hugging Face folder would have. Raises KeyError: a key is missing."""
    heads, hidden = value("attention.head_count"), value("embedding_length")
    head_dim = metadata.get(f"{arch}.attention.key_length", hidden // heads)
    rotary = metadata.get(f"{arch}.rope.dimension_count", head_dim)
    if head_dim < 1 or rotary % 2 or rotary > head_dim:
        raise ModelError(f"{source}: heads of {head_dim} numbers, of which {rotary} are turned in pairs, can't be.")
    layers = value("block_count")
    scalar = hidden // heads if layers == family.wide else head_dim
    return {
        "architectures": [family.architecture],
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": value("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "query_pre_attn_scalar": scalar,
        "partial_rotary_factor": rotary / head_dim,
        **_rope(metadata, arch, source),
        **{name: value(key) for name, key in family.more.items()},
        **family.fixed,
    }


def _rope(metadata: Mapping[str, Json], arch: str, source: str) -> dict[str, Any]:
    kind = metadata.get(f"{arch}.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise ModelError(f"{source}: GGUF rope scaling {kind!r} is not supported.", hint="Use the HF folder.")
    theta = metadata.get(f"{arch}.rope.freq_base")
    found: dict[str, Any] = {} if theta is None else {"rope_theta": theta}
    if kind == "linear":
        found["rope_scaling"] = {"rope_type": "linear", "factor": metadata[f"{arch}.rope.scaling.factor"]}
    return found
