"""Causal language models of transformers, tiny and random, each by the name of its kind."""

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_SMALL = dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim"), 32) | dict.fromkeys(
    ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers"), 2
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
) | dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96) | {
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_kv_shared_layers": 0,
    "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1, "is_decoder": True,
}  # fmt: skip
# Heads that share keys and values, where a kind does not tie their count to others of its settings.
_GROUPED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2", "glm", "glm4", "cohere", "granite",
            "starcoder2", "stablelm", "nemotron", "smollm3", "seed_oss", "helium", "mixtral", "qwen3_moe", "olmoe")  # fmt: skip


def _has(config: transformers.PreTrainedConfig, name: str) -> bool:
    try:
        return hasattr(config, name)
    except RuntimeError:  # each layer has its own
        return True


def tiny(kind: str) -> transformers.PreTrainedModel:
    """A model of a kind, in float32.

    Raises:
        Exception: of any class: the kind can't be made so small.
    """
    whole = CONFIG_MAPPING[kind]()
    text = whole.get_text_config()
    settings: dict[str, object] = {name: value for name, value in _SMALL.items() if _has(text, name)}
    if kind in _GROUPED:
        settings["num_key_value_heads"] = 2
    if types := getattr(text, "layer_types", None):
        settings["layer_types"] = [types[0], types[-1]]
    config = type(text)(**settings)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    model_class = getattr(transformers, name if isinstance(name, str) else name[0])
    with torch.device("meta"):
        size = sum(part.numel() for part in model_class(config).parameters())
    if size > 30_000_000:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    model: transformers.PreTrainedModel = model_class(config).eval()
    with torch.no_grad():
        for part in model.parameters():
            if part.ndim > 1:
                part.copy_(torch.randn(part.shape) / part.shape[-1] ** 0.5)
    return model
