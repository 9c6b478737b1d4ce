"""Causal language models of transformers, tiny and random, each by the name of its kind."""

import copy
import dataclasses
import re
from itertools import cycle, islice
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_SMALL = dict.fromkeys(
    ("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim", "hidden_size_global"), 32
) | dict.fromkeys(
    ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers", "num_encoder_layers",
     "num_decoder_layers"), 2
) | dict.fromkeys(
    ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "decoder_ffn_dim"), 48
) | dict.fromkeys(
    ("num_attention_heads", "n_head", "num_heads", "decoder_attention_heads", "num_experts", "num_local_experts",
     "n_routed_experts", "sliding_window", "rotary_dim", "num_key_value_heads"), 4
) | dict.fromkeys(
    ("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "hidden_size_per_layer_input"), 8
) | dict.fromkeys(
    ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank", "qk_head_dim"), 16
) | dict.fromkeys(
    ("max_position_embeddings", "n_positions", "n_ctx"), 64
) | dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), 96) | {
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_kv_shared_layers": 0,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "is_decoder": True,
}  # fmt: skip
# Heads that share keys and values, where a kind does not tie their count to others of its settings.
_GROUPED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2", "glm", "glm4", "cohere", "granite",
            "starcoder2", "stablelm", "nemotron", "smollm3", "seed_oss", "helium", "mixtral", "qwen3_moe", "olmoe")  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_INDEXER = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 24, "indexer_compress_ratio": 4,
}  # fmt: skip
# Settings that a kind's own checks require.
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 96},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8.0}},
    "dots1": {"n_shared_experts": 1},
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 2,
            "model_type": "gemma4_text",
        },
    },
    "inkling2_loop_text": {
        "n_layers_per_attn_res_block": 1,
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
    },
    "gemma4_unified": {"vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 8}},
    "gemma4_unified_assistant": {
        "text_config": {"num_kv_shared_layers": 2, "model_type": "gemma4_unified_text"},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "mimo_v2_flash": {"num_key_value_heads": 2},  # layers with a window have twice as many
    "musicgen": {"num_codebooks": 1},
    "musicgen_melody": {"num_codebooks": 1},
    # transformers' prompts have this limit, its single tokens and the publisher's code have not
    "nemotron_h": {"time_step_min": 1e-30, "time_step_floor": 1e-30},
    # queries, keys and values alike: transformers saves the kernels of others wrongly
    "olmo_hybrid": {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "prophetnet": {"num_decoder_attention_heads": 4},
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [16, 16],
        "attn_layers": ["local", "lsh"],
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
_ATTENTIONS = {"full_attention", "sliding_attention"}
# Names that count no tokens of a text, or its longest.
_NO_LIMITS = re.compile(
    r"_(id|ids|idx|index)$|^_|seed$|version$|^(max_position_embeddings|n_positions|n_ctx|max_seq_len)$"
)
_LONGEST = dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256)


def tiny(kind: str, limit: int | None = None, **settings: object) -> transformers.PreTrainedModel:
    """A model of a kind, in float32.

    Args:
        limit: number of tokens that every window, chunk or other limit of the kind is set to; then
            the model takes 256 tokens.
        settings: of the config, where there is no limit.

    Raises:
        Exception: of any class: the kind can't be made so small.
    """
    model_class = class_of(kind)
    config = config_of(kind, **settings) if limit is None else limited_config(kind, limit)
    if kind in _GROUPED:
        config.num_key_value_heads = 2
    size = sum(shape.numel() for shape in _shapes(model_class, config).values())
    if size > 30_000_000:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model: transformers.PreTrainedModel = model_class(config).eval()
    with torch.no_grad():
        for part in model.parameters():
            if part.ndim > 1:
                part.copy_(torch.randn(part.shape) / part.shape[-1] ** 0.5)
    return model


def class_of(kind: str) -> type[transformers.PreTrainedModel]:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def config_of(kind: str, **settings: object) -> transformers.PreTrainedConfig:
    whole, own = CONFIG_MAPPING[kind], class_of(kind).config_class
    return _small(own if own in whole.sub_configs.values() else whole, _OWN.get(kind, {}), settings)


def small_config(kind: str) -> transformers.PreTrainedConfig:
    """Small config of any kind that transformers has, for whatever task. Raises what transformers
    does if it can't be.
    """
    return _small(CONFIG_MAPPING[kind], _OWN.get(kind, {}), {})


def _small(
    config_class: type[transformers.PreTrainedConfig],
    own: dict[str, Any],
    settings: dict[str, object],
) -> transformers.PreTrainedConfig:
    fields = {field.name for field in dataclasses.fields(config_class)}
    named = {
        config_class.attribute_map.get(name, name): value
        for name, value in (_SMALL | settings).items()
    }
    given: dict[str, Any] = {name: value for name, value in named.items() if name in fields}
    if "layer_types" in fields and (types := config_class().layer_types):
        both = (
            "use_sliding_window" in settings
            and "sliding_window" in fields
            and {*types} <= _ATTENTIONS
        )
        pair = sorted(_ATTENTIONS) if both else [types[0], types[-1]]
        given["layer_types"] = [*islice(cycle(pair), given.get("num_hidden_layers", 2))]
    for name, part in config_class.sub_configs.items():
        parts = own.get(name, {})
        if part is transformers.AutoConfig:
            part = (
                CONFIG_MAPPING[parts["model_type"]]
                if parts
                else type(getattr(config_class(), name))
            )
        given[name] = _small(part, parts, settings)
    return config_class(
        **given
        | {name: value for name, value in own.items() if name not in config_class.sub_configs}
    )


def limited_config(kind: str, limit: int) -> transformers.PreTrainedConfig:
    """Config of a kind in which every whole number that changes no weight's shape is `limit` if it
    is larger or not set: windows, chunks, counts of chosen tokens, under whatever name.
    """
    config, model_class = (
        config_of(kind, use_sliding_window=True, sliding_window=limit, **_LONGEST),
        class_of(kind),
    )
    shapes = _shapes(model_class, config)
    for place, part in enumerate(_parts(config)):
        types = {field.name: str(field.type) for field in dataclasses.fields(part)}
        for name, value in sorted(vars(part).items()):
            unset = (
                value is None
                and re.search(r"\bint\b", types.get(name, ""))
                and "list" not in types[name]
            )
            if _NO_LIMITS.search(name) or not (unset or (type(value) is int and value > limit)):
                continue
            other = copy.deepcopy(config)
            try:
                setattr(_parts(other)[place], name, limit)
                if _shapes(model_class, other) != shapes:
                    continue
            except Exception:  # of any class: the number is a shape, or the kind takes no such one
                continue
            setattr(part, name, limit)
    return config


def _parts(config: transformers.PreTrainedConfig) -> list[transformers.PreTrainedConfig]:
    parts = [vars(config).get(name) for name in config.sub_configs]
    return [config, *(inner for part in parts if part is not None for inner in _parts(part))]


def _shapes(
    model_class: type[transformers.PreTrainedModel], config: transformers.PreTrainedConfig
) -> dict[str, torch.Size]:
    with torch.device("meta"):
        return {name: weight.shape for name, weight in model_class(config).named_parameters()}
