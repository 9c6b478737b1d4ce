"""Specification of a decoder, read from a Hugging Face `config.json` or a GGUF file's metadata.

One record drives one parametrised decoder (`decoder.py`); a family is a reading of its config, not a class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models import config_fields


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base, how much of the head turns, and how frequencies are scaled.

    Attributes:
        rotary_dim: None for the whole head.
        params: `factor` and what else the kind needs, by transformers' names.
    """

    theta: float = 10_000.0
    kind: str = "default"
    rotary_dim: int | None = None
    params: Mapping[str, config_fields.Json] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape and the switches of a decoder-only transformer.

    Attributes:
        windows: per layer, the sliding-window length in tokens, None for full attention.
        local_rope: rotary embedding of the layers that have a window, where it differs.
        scale: what attention scores are multiplied with.
        activation: "silu", "gelu" or "gelu_tanh".
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
    "Gemma3ForConditionalGeneration": "gemma3",
    "Phi3ForCausalLM": "phi3",
}

_GEMMA = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
# What transformers takes a field to be that a config leaves out; the hub's configs do leave out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"sliding_window": 4096, "max_window_layers": 28},
    "qwen3": {"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    "gemma2": {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3": {**_GEMMA, "vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1_000_000.0,
               "sliding_window_pattern": 6},
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
}  # fmt: skip
_FIRST = {name: config_fields.CONFIG[name] for name in ("architectures", "text_config")}  # say what the others mean
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
}  # fmt: skip
# What the frequency scaling of each kind needs.
_ROPE_KINDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("factor", "short_factor", "long_factor"),
}


def spec_from_config(config: Mapping[str, config_fields.Json], source: str) -> ModelSpec:
    """Reads a Hugging Face config; of a vision-language model, its text part.

    Args:
        config: the parsed `config.json`.
        source: the file's name, for messages.

    Raises:
        ModelError: an architecture or option that is not supported, or a field that is missing or senseless.
    """
    config_fields.check(
        {"architectures": config.get("architectures"), "text_config": config.get("text_config")}, _FIRST, source
    )
    names = config.get("architectures") or []
    names = [names] if isinstance(names, str) else names
    family = next((ARCHITECTURES[name] for name in names if name in ARCHITECTURES), None)
    if family is None:
        raise ModelError(
            f"{source}: architecture {', '.join(names) or 'not named'} is not supported.",
            hint=f"Supported: {', '.join(ARCHITECTURES)}.",
        )
    whole = {**_DEFAULTS[family], **(config.get("text_config") or {}), **config}
    config_fields.check(whole, config_fields.CONFIG, source)
    for name in ("rope_parameters", "rope_scaling"):
        _check_rope(whole.get(name) or {}, source)
    try:
        spec = _read_config(family, whole)
    except KeyError as error:
        raise ModelError(f"{source}: the field {error} is missing.") from error
    except (ValueError, ArithmeticError) as error:
        raise ModelError(f"{source}: {error}") from error
    config_fields.check_ids(list(spec.eos_ids), spec.vocab_size, source, "eos_token_id")
    config_fields.check_ids(spec.bos_id, spec.vocab_size, source, "bos_token_id")
    return spec


def _check_rope(parameters: Mapping[str, config_fields.Json], source: str) -> None:
    config_fields.check(parameters, config_fields.ROPE, source)
    for name in ("full_attention", "sliding_attention"):
        config_fields.check(parameters.get(name) or {}, config_fields.ROPE, source)


def _read_config(family: str, config: Mapping[str, config_fields.Json]) -> ModelSpec:
    heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads can't share {kv_heads} key-value heads")
    head_dim = config.get("head_dim") or hidden_size // heads
    if head_dim < 1:
        raise ValueError(f"hidden_size {hidden_size} is too small for {heads} attention heads")
    gemma = family in ("gemma2", "gemma3")
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        raise ValueError(f"the activation {activation!r} is not supported (only {', '.join(_ACTIVATIONS)})")
    if config.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention is not supported")
    attention_bias = config.get("attention_bias", False) and family not in ("mistral", "qwen2", "phi3")
    rope, local_rope = _ropes(family, config, head_dim)
    eos = config.get("eos_token_id")
    return ModelSpec(
        architecture=family,
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=config["intermediate_size"],
        max_positions=_max_positions(config, rope),
        rms_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope,
        local_rope=local_rope,
        scale=(config["query_pre_attn_scalar"] if gemma else head_dim) ** -0.5,
        windows=_windows(family, config),
        activation=_ACTIVATIONS[activation],
        tied_embeddings=config.get("tie_word_embeddings", False),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=config.get("mlp_bias", False) and family == "llama",
        qk_norm=family in ("qwen3", "gemma3"),
        post_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        embedding_scale=math.sqrt(hidden_size) if gemma else 1.0,
        attention_softcap=config.get("attn_logit_softcapping") if family == "gemma2" else None,
        logit_softcap=config.get("final_logit_softcapping") if gemma else None,
        eos_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        bos_id=config.get("bos_token_id"),
    )


def _max_positions(config: Mapping[str, config_fields.Json], rope: RopeSpec) -> int:
    """A model's own limit, or what YaRN stretches it to: people add YaRN to a config and leave the limit as it is."""
    limit: int = config["max_position_embeddings"]
    if rope.kind == "yarn":
        limit = max(limit, int(rope.params["factor"] * rope.params["original_max_position_embeddings"]))
    return limit


def _ropes(family: str, config: Mapping[str, config_fields.Json], head_dim: int) -> tuple[RopeSpec, RopeSpec | None]:
    """The global and, where layers with a window turn differently, the local rotary embedding.

    transformers 5 writes `rope_parameters` (for Gemma 3 one entry per layer type), older files `rope_theta`,
    `rope_scaling` and `rope_local_base_freq`.
    """
    given = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    full, local = given.pop("full_attention", None), given.pop("sliding_attention", None)
    rope = _rope(family, {"rope_theta": config.get("rope_theta", 10_000.0), **(full or {}), **given}, config, head_dim)
    if family != "gemma3":
        return rope, None
    theta = config.get("rope_local_base_freq", 10_000.0)
    return rope, _rope(family, {"rope_theta": theta, **(local or {})}, config, head_dim)


def _rope(
    family: str, parameters: Mapping[str, config_fields.Json], config: Mapping[str, config_fields.Json], head_dim: int
) -> RopeSpec:
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if family == "phi3" and kind in ("su", "yarn"):  # what early Phi-3 files call it
        kind = "longrope"
    if kind not in _ROPE_KINDS:
        raise ValueError(f"rope type {kind!r} is not supported (only {', '.join(_ROPE_KINDS)})")
    limit = config["max_position_embeddings"]
    # A config that has it outside the rope parameters (Phi-3) means that one.
    original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
    params = {name: value for name, value in parameters.items() if name not in ("rope_type", "type", "rope_theta")}
    params["original_max_position_embeddings"] = original or limit
    if kind in ("yarn", "longrope") and params.get("factor") is None:
        params["factor"] = limit / params["original_max_position_embeddings"]
    rotary_dim = int(head_dim * parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    for name in _ROPE_KINDS[kind]:
        count = rotary_dim // 2 if name in ("short_factor", "long_factor") else 1
        numbers = params[name] if isinstance(params[name], list) else [params[name]]
        if len(numbers) != count or not all(isinstance(n, int | float) and n > 0 for n in numbers):
            raise ValueError(f"rope's {name} is {params[name]!r}, not {count} positive numbers")
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"{rotary_dim} numbers of a head can't be turned in pairs")
    return RopeSpec(theta=float(parameters["rope_theta"]), kind=kind, rotary_dim=rotary_dim, params=params)


def _windows(family: str, config: Mapping[str, config_fields.Json]) -> tuple[int | None, ...]:
    layers: int = config["num_hidden_layers"]
    window = config.get("sliding_window")
    optional = family in ("qwen2", "qwen3")
    if not window or family == "llama" or (optional and not config.get("use_sliding_window")):
        return (None,) * layers
    kinds = config.get("layer_types") or [_layer_type(family, config, i) for i in range(layers)]
    if len(kinds) != layers or set(kinds) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types {kinds} don't fit {layers} layers of full or sliding attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _layer_type(family: str, config: Mapping[str, config_fields.Json], layer: int) -> str:
    if family == "gemma2":
        full = layer % 2 == 1
    elif family == "gemma3":
        full = (layer + 1) % config["sliding_window_pattern"] == 0
    else:
        full = layer < config.get("max_window_layers", 0)  # of Qwen alone
    return "full_attention" if full else "sliding_attention"


def spec_from_gguf(metadata: Mapping[str, config_fields.Json], tensors: frozenset[str], source: str) -> ModelSpec:
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
    if arch not in ("llama", "qwen2", "qwen3"):
        raise ModelError(
            f"{source}: GGUF architecture {arch!r} is not supported.", hint="Supported: llama, qwen2, qwen3."
        )
    try:
        heads = metadata[f"{arch}.attention.head_count"]
        head_dim = metadata.get(f"{arch}.attention.key_length", metadata[f"{arch}.embedding_length"] // heads)
        rotary = metadata.get(f"{arch}.rope.dimension_count", head_dim)
        if head_dim < 1 or rotary % 2 or rotary > head_dim:
            raise ModelError(f"{source}: heads of {head_dim} numbers, of which {rotary} are turned in pairs, can't be.")
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
                rotary_dim=rotary,
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
