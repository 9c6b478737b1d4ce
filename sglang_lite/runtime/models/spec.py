"""What a decoder is made of, read from a Hugging Face `config.json` or a GGUF file's metadata.

One record drives one parametrised decoder (`decoder.py`); a family is a reading of its config, not a class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_lite.protocol import ModelError


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base, fraction of the head that turns, and how frequencies are scaled."""

    theta: float = 10_000.0
    kind: str = "default"
    rotary_dim: int | None = None
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape and the switches of a decoder-only transformer.

    Attributes:
        windows: per layer, the sliding-window length in tokens, None for full attention.
        local_rope: rotary embedding of the layers that have a window, where it differs.
        scale: what attention scores are multiplied with.
        norm_offset: 1.0 where RMSNorm multiplies by (1 + weight).
        post_norms: attention and MLP outputs are normalised before they are added.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rms_eps: float
    rope: RopeSpec
    scale: float
    windows: tuple[int | None, ...]
    local_rope: RopeSpec | None = None
    activation: str = "silu"
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None


ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "Phi3ForCausalLM": "phi3",
}


def spec_from_config(config: Mapping[str, Any], source: str) -> ModelSpec:
    """Reads a Hugging Face config.

    Args:
        config: the parsed `config.json`.
        source: the file's name, for messages.

    Raises:
        ModelError: an architecture or option that is not supported, or a field that is missing.
    """
    names = config.get("architectures") or []
    family = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if family is None:
        raise ModelError(
            f"{source}: architecture {', '.join(names) or 'not named'} is not supported.",
            hint=f"Supported: {', '.join(ARCHITECTURES)}.",
        )
    if "quantization_config" in config:
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{source}: weights quantised with {method!r} are not supported.",
            hint="Use the unquantised checkpoint, or a GGUF file.",
        )
    try:
        return _read_config(family, config)
    except KeyError as error:
        raise ModelError(f"{source}: the field {error} is missing.") from error


def _read_config(family: str, config: Mapping[str, Any]) -> ModelSpec:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    layers = config["num_hidden_layers"]
    gemma = family in ("gemma2", "gemma3")
    scale_base = config.get("query_pre_attn_scalar") if gemma else None
    eos = config.get("eos_token_id")
    rope, local_rope = _ropes(family, config, head_dim)
    return ModelSpec(
        architecture=family,
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate_size=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
        rms_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        scale=(scale_base or head_dim) ** -0.5,
        windows=_windows(family, config, layers),
        activation=config.get("hidden_activation") or config.get("hidden_act") or "silu",
        tied_embeddings=config.get("tie_word_embeddings", gemma),
        qkv_bias=config.get("attention_bias", family == "qwen2"),
        output_bias=config.get("attention_bias", False) and family == "llama",
        mlp_bias=config.get("mlp_bias", False),
        qk_norm=family in ("qwen3", "gemma3"),
        post_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        embedding_scale=math.sqrt(config["hidden_size"]) if gemma else 1.0,
        attention_softcap=config.get("attn_logit_softcapping") if family == "gemma2" else None,
        logit_softcap=config.get("final_logit_softcapping") if gemma else None,
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        bos_id=config.get("bos_token_id"),
    )


def _ropes(family: str, config: Mapping[str, Any], head_dim: int) -> tuple[RopeSpec, RopeSpec | None]:
    """The global and, where layers with a window turn differently, the local rotary embedding.

    transformers 5 writes `rope_parameters` (for Gemma 3 one entry per layer type), older files `rope_theta`,
    `rope_scaling` and `rope_local_base_freq`.
    """
    parameters = config.get("rope_parameters")
    if parameters and "full_attention" in parameters:
        full, sliding = parameters["full_attention"], parameters.get("sliding_attention")
        return _rope(full, config, head_dim), _rope(sliding, config, head_dim) if sliding else None
    if parameters:
        return _rope(parameters, config, head_dim), None
    scaling = dict(config.get("rope_scaling") or {})
    theta = config.get("rope_theta", 1_000_000.0 if family == "gemma3" else 10_000.0)
    rope = _rope({"rope_theta": theta, **scaling}, config, head_dim)
    if family == "gemma3":
        local = config.get("rope_local_base_freq", 10_000.0)
        return rope, _rope({"rope_theta": local}, config, head_dim)
    return rope, None


def _rope(parameters: Mapping[str, Any], config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    supported = ("default", "linear", "llama3", "yarn", "longrope")
    if kind not in supported:
        raise ModelError(f"rope type {kind!r} is not supported.", hint=f"Supported: {', '.join(supported)}.")
    fraction = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    params = {key: value for key, value in parameters.items() if key not in ("rope_type", "type", "rope_theta")}
    params.setdefault("max_position_embeddings", config.get("max_position_embeddings"))
    if "original_max_position_embeddings" not in params and "original_max_position_embeddings" in config:
        params["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return RopeSpec(
        theta=parameters.get("rope_theta", config.get("rope_theta", 10_000.0)),
        kind=kind,
        rotary_dim=int(head_dim * fraction),
        params=params,
    )


def _windows(family: str, config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not window or not config.get("use_sliding_window", family not in ("qwen2", "qwen3")):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds is None:
        if family == "gemma2":
            kinds = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(layers)]
        elif family == "gemma3":
            pattern = config.get("sliding_window_pattern", 6)
            kinds = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
        elif family in ("qwen2", "qwen3"):
            first = config.get("max_window_layers", 0)
            kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
        else:
            kinds = ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def spec_from_gguf(metadata: Mapping[str, Any], tensors: frozenset[str], source: str) -> ModelSpec:
    """Reads a GGUF file's metadata.

    Args:
        metadata: key to value.
        tensors: the names of the file's tensors (a missing `output.weight` means tied embeddings).
        source: the file's name, for messages.

    Raises:
        ModelError: an architecture that is not supported, or a key that is missing.
    """
    arch = metadata.get("general.architecture")
    if arch not in ("llama", "qwen2", "qwen3"):
        raise ModelError(
            f"{source}: GGUF architecture {arch!r} is not supported.", hint="Supported: llama, qwen2, qwen3."
        )
    try:
        heads = metadata[f"{arch}.attention.head_count"]
        head_dim = metadata.get(f"{arch}.attention.key_length", metadata[f"{arch}.embedding_length"] // heads)
        layers = metadata[f"{arch}.block_count"]
        eos = metadata.get("tokenizer.ggml.eos_token_id")
        scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
        params: dict[str, Any] = {}
        if scaling not in ("none", "linear"):
            raise ModelError(f"{source}: GGUF rope scaling {scaling!r} is not supported.", hint="Use the HF folder.")
        if scaling == "linear":
            params["factor"] = metadata[f"{arch}.rope.scaling.factor"]
        return ModelSpec(
            architecture=arch,
            vocab_size=len(metadata["tokenizer.ggml.tokens"]),
            hidden_size=metadata[f"{arch}.embedding_length"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=metadata.get(f"{arch}.attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=metadata[f"{arch}.feed_forward_length"],
            max_positions=metadata[f"{arch}.context_length"],
            rms_eps=metadata[f"{arch}.attention.layer_norm_rms_epsilon"],
            rope=RopeSpec(
                theta=metadata.get(f"{arch}.rope.freq_base", 10_000.0),
                kind="linear" if scaling == "linear" else "default",
                rotary_dim=metadata.get(f"{arch}.rope.dimension_count", head_dim),
                params=params,
            ),
            scale=head_dim**-0.5,
            windows=(None,) * layers,
            tied_embeddings="output.weight" not in tensors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            eos_ids=() if eos is None else (eos,),
            bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        )
    except KeyError as error:
        raise ModelError(f"{source}: the metadata key {error} is missing.") from error
