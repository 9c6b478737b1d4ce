"""Schema of model files: name, type and range of each field, checked before anything is allocated.

`read_config.py` and `families.py` interpret the models' fields, `tokens/tokenizer.py` the
tokenizer's. A field that is not listed here is not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from sglang_lite.protocol import ModelError

Json: TypeAlias = Any  # parsed JSON or metadata, of any shape until it has been checked
Config: TypeAlias = Mapping[str, Json]

MAX_BYTES = 256 << 20  # largest JSON file
MAX_TOKENS = 1 << 24  # largest vocabulary
MAX_EXPERTS = 1 << 16  # most experts of a layer
MAX_POSITIONS = (1 << 31) - 1  # positions are int32


@dataclass(frozen=True, slots=True)
class Field:
    """Type and range of a field.

    Attributes:
        kind: "whole", "number", "flag", "text" or "object" for one value; "pattern" for a whole
            number or a text; "switch" for a flag or a text; "wholes", "numbers" or "texts" for a
            list, which may also be a single bare item.
        least, most: inclusive range of a number.
        required: whether the field may be neither missing nor null.
    """

    kind: Literal[
        "whole",
        "pattern",
        "number",
        "flag",
        "switch",
        "text",
        "object",
        "wholes",
        "numbers",
        "texts",
    ]
    least: float = -math.inf
    most: float = math.inf
    required: bool = False

    def problem(self, value: Json) -> str | None:
        """Returns the reason why a value is invalid, as the end of an error message. Returns None
        if it is valid.
        """
        if self.kind in ("wholes", "numbers", "texts"):
            if isinstance(value, list) and value and self._all_valid(value):
                return None  # without checking each item: vocabularies are long
            one = Field(_ONE_OF[self.kind], self.least, self.most)
            for item in value if isinstance(value, list) else [value]:
                if problem := one.problem(item):
                    return (
                        f"has {abbreviate(item)}, which {problem}"
                        if isinstance(value, list)
                        else problem
                    )
            return None
        if not isinstance(value, _TYPES[self.kind]) or (
            isinstance(value, bool) and self.kind not in ("flag", "switch")
        ):
            return f"is no {_NAMES[self.kind]}"
        if self.kind in ("whole", "number") and not self.least <= value <= self.most:
            return f"is not between {self.least:,} and {self.most:,}"
        return None

    def _all_valid(self, values: list[Json]) -> bool:
        """Checks quickly whether a list is valid, if it holds only texts or only whole numbers. If
        this returns False, each item must still be checked.
        """
        types = set(map(type, values))
        if self.kind == "wholes" and types == {int}:
            return bool(self.least <= min(values) and max(values) <= self.most)
        return self.kind == "texts" and types == {str}


_ONE_OF: Mapping[str, Json] = {"wholes": "whole", "numbers": "number", "texts": "text"}
_TYPES: Mapping[str, Json] = {
    "whole": int,
    "pattern": int | str,
    "number": int | float,
    "flag": bool,
    "switch": bool | str,
    "text": str,
    "object": dict,
}
_NAMES = {
    "whole": "whole number",
    "pattern": "whole number or text",
    "number": "number",
    "flag": "true or false",
    "switch": "true, false or text",
    "text": "text",
    "object": "JSON object",
}

_SMALL = 1e-30  # stands for "above 0"


def _integer_field(least: int, most: int, *, required: bool = False) -> Field:
    return Field("whole", least, most, required)


def _positive_number_field(most: float = 1e30) -> Field:
    return Field("number", _SMALL, most)


_ID = _integer_field(0, MAX_TOKENS - 1)
_IDS = Field("wholes", 0, MAX_TOKENS - 1)
_FLAG = Field("flag")
_TEXT = Field("text")
_OBJECT = Field("object")

# Fields of config.json and of its text_config.
CONFIG: Mapping[str, Field] = {
    **dict.fromkeys((
        "architectures", "layer_types", "mlp_layer_types", "layers_block_type", "block_types",
    ), Field("texts")),
    **dict.fromkeys((
        "text_config", "quantization_config", "rope_parameters", "rope_scaling", "attn_config", "linear_attn_config",
        "per_layer_config",
    ), _OBJECT),
    "vocab_size": _integer_field(1, MAX_TOKENS, required=True),
    "hidden_size": _integer_field(1, 1 << 20, required=True),
    "intermediate_size": _integer_field(1, 1 << 24, required=True),
    "num_hidden_layers": _integer_field(1, 10_000, required=True),
    "num_attention_heads": _integer_field(1, 1 << 16, required=True),
    **dict.fromkeys((
        "num_key_value_heads", "num_kv_heads", "head_dim", "qk_nope_head_dim", "v_head_dim", "global_head_dim",
        "num_global_key_value_heads", "attention_head_dim", "swa_num_attention_heads", "swa_num_key_value_heads",
        "swa_head_dim", "d_rel",
    ), _integer_field(1, 1 << 16)),
    "max_position_embeddings": _integer_field(1, MAX_POSITIONS, required=True),
    **dict.fromkeys((
        "original_max_position_embeddings", "no_rope_layer_interval", "decoder_sparse_step", "moe_layer_freq",
        "moe_layer_interval", "global_attn_every_n_layers", "prefix_dense_sliding_window_pattern",
    ), _integer_field(1, MAX_POSITIONS)),
    **dict.fromkeys((
        "rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon", "mixer_rms_eps",
        "eps",
    ), Field("number", 0.0, 1.0)),
    **dict.fromkeys(("conv_L_cache", "linear_conv_kernel_dim", "short_conv_kernel_size"), _integer_field(1, 64)),
    "kda_lower_bound": Field("number", -1e30, 0.0),
    **dict.fromkeys(("mamba_d_conv", "conv_kernel", "conv1d_width"), _integer_field(1, 17)),
    **dict.fromkeys(("cca_time0", "cca_time1"), _integer_field(1, 8)),
    **dict.fromkeys((
        "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_num_heads", "mamba_head_dim", "n_groups",
        "ssm_state_size", "mamba_expand", "state_size", "expand", "num_heads", "n_mamba_heads", "mamba_ngroups",
        "num_mem_blocks", "adapter_rank", "router_hidden_size",
    ), _integer_field(1, 1 << 16)),
    **dict.fromkeys(("mamba_d_head", "mamba_dt_rank", "time_step_rank"), Field("pattern")),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), _integer_field(1, 10_000)),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), _integer_field(0, 10_000)),
    **dict.fromkeys(("mlp_multipliers", "ssm_multipliers"), Field("numbers", _SMALL, 1e30)),
    **dict.fromkeys(("lru_width", "attention_hidden_size", "embedding_dim"), _integer_field(1, 1 << 20)),
    "num_blocks": _integer_field(1, 10_000),
    "ffn_round_up_to_multiple_of": _integer_field(1, 1 << 16),
    "rescale_every": _integer_field(-10_000, 10_000),
    "mamba_d_ssm": _integer_field(1, 1 << 24),
    "attn_layer_indices": Field("wholes", 0, 10_000),
    "moe_shared_expert_intermediate_size": _integer_field(0, 1 << 24),
    "hidden_size_per_layer_input": _integer_field(0, 1 << 16),
    "vocab_size_per_layer_input": _integer_field(0, MAX_TOKENS),
    "num_kv_shared_layers": _integer_field(0, 10_000),
    **dict.fromkeys(("full_attention_interval", "layer_group_size"), _integer_field(1, 10_000)),
    **dict.fromkeys((
        "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_num_heads", "linear_head_dim",
    ), _integer_field(1, 1 << 16)),
    **dict.fromkeys((
        "attention_chunk_size", "interleave_moe_layer_step", "floor_scale", "rel_extent", "sliding_window_size",
        "log_scaling_n_floor",
    ), _integer_field(1, MAX_POSITIONS)),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size"), _integer_field(1, 1 << 24)),
    "conv_kernel_size": _integer_field(2, 17),
    "dense_mlp_idx": _integer_field(0, 10_000),
    "n_layers_per_attn_res_block": _integer_field(1, 10_000),
    **dict.fromkeys((
        "loop_layer_index_start", "loop_layer_index_end", "loop_num_passes", "loop_gate_rank",
    ), _integer_field(1, 10_000)),
    "local_layer_ids": Field("wholes", 0, 10_000),
    "unpadded_vocab_size": _integer_field(1, MAX_TOKENS),
    "expansion_ratio": _positive_number_field(),
    "moe_layers": Field("wholes", 0, 10_000),
    **dict.fromkeys(("block_ff_dim", "block_multiple_of"), _integer_field(1, 1 << 24)),
    "full_attn_idxs": Field("wholes", 0, 10_000),
    **dict.fromkeys((
        "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "rotary_emb_base",
        "rope_theta", "rope_local_base_freq", "logit_scale", "clip_qkv", "embedding_multiplier",
        "residual_multiplier", "attention_multiplier", "logits_scaling", "routed_scaling_factor", "scale_emb",
        "scale_depth", "swiglu_alpha", "swiglu_limit", "block_ffn_dim_multiplier", "attn_scale",
        "softmax_scale", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier",
        "ssm_in_multiplier", "ssm_out_multiplier", "full_attn_alpha_factor", "full_attn_beta_factor",
        "linear_attn_alpha_factor", "linear_attn_beta_factor", "mlp_alpha_factor", "mlp_beta_factor",
        "logits_soft_cap", "qk_dim_factor", "v_dim_factor", "ffn_proj_factor", "gate_soft_cap", "output_logit_soft_cap",
        "logits_mup_width_multiplier", "route_scale", "qk_l2_clip_threshold", "rel_l2_clip_threshold",
        "mlp_gate_softcap", "mlp_up_softcap",
    ), _positive_number_field()),
    **dict.fromkeys(("router_jitter_noise", "time_step_min", "log_scaling_alpha"), Field("number", 0.0, 1e30)),
    "rotary_pct": _positive_number_field(1.0),
    "partial_rotary_factor": _positive_number_field(1.0),
    "num_ln_in_parallel_attn": _integer_field(1, 2),
    "num_dense_layers": _integer_field(0, MAX_POSITIONS),
    "prefix_dense_intermediate_size": _integer_field(1, 1 << 24),
    **dict.fromkeys((
        "sliding_window", "attention_window_size", "max_window_layers", "first_k_dense_replace",
    ), _integer_field(0, MAX_POSITIONS)),
    "sliding_window_pattern": Field("pattern"),
    **dict.fromkeys((
        "hidden_act", "hidden_activation", "topk_method", "mamba_hidden_act", "mlp_hidden_act",
        "hybrid_override_pattern", "position_embedding_type", "hidden_mamba_act", "scoring_func",
        "weight_mode", "inference_state_dtype",
    ), _TEXT),
    **dict.fromkeys((
        "use_sliding_window", "is_causal", "tie_word_embeddings",
        "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp",
        "attention_bias", "qkv_bias", "attention_out_bias", "mlp_bias", "use_bias", "use_qk_norm",
        "qk_layernorm", "use_qkv_bias", "use_parallel_residual", "norm_topk_prob", "rope_interleave",
        "enable_bias", "layer_norm_elementwise_affine", "new_decoder_architecture", "multi_query", "parallel_attn",
        "mup_enabled", "lm_head_bias", "linear_allow_neg_eigval",
        "tie_embedding", "conv_bias", "block_auto_adjust_ff_dim", "use_expert_bias",
        "use_sandwich_norm", "use_attention_gate", "alibi", "attn_temperature_tuning",
        "mamba_conv_bias", "mamba_proj_bias", "use_conv_bias", "mamba_rms_norm", "mamba_norm_before_gate",
        "projectors_bias", "kda_safe_gate", "add_bias_linear", "use_shared_attention_adapter", "use_mem_rope",
        "add_out_norm", "norm_reduction_force_float32", "shared_expert_sink",
    ), _FLAG),
    "use_bidirectional_attention": Field("switch"),
    "no_rope_layers": Field("wholes", 0, 1),
    **dict.fromkeys((
        "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_shared_experts",
        "moe_num_experts", "moe_num_shared_experts",
    ), _integer_field(0, MAX_EXPERTS)),
    "moe_topk": Field("wholes", 1, MAX_EXPERTS),
    **dict.fromkeys((
        "num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_k", "n_group", "num_expert_group",
        "topk_group",
    ), _integer_field(1, MAX_EXPERTS)),
    "moe_intermediate_size": _integer_field(1, 1 << 24),
    "shared_intermediate_size": _integer_field(0, 1 << 24),
    "shared_expert_intermediate_size": _integer_field(0, 1 << 24),
    "mlp_only_layers": Field("wholes", 0, MAX_POSITIONS),
    **dict.fromkeys(("moe_layer_start_index", "moe_layer_end_index"), _integer_field(-1, MAX_POSITIONS)),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), _integer_field(0, 10_000)),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "dim_model_base"), _integer_field(1, 1 << 20)),
    "rotary_dim": _integer_field(0, 1 << 16),
    "qk_rope_head_dim": _integer_field(2, 1 << 16),
    "eos_token_id": _IDS,
    "bos_token_id": _ID,
}  # fmt: skip
# Fields of rope_parameters and rope_scaling in config.json, and of their parts for each type of
# layer.
ROPE: Mapping[str, Field] = {
    "rope_type": _TEXT,
    "type": _TEXT,
    **dict.fromkeys((
        "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast",
        "beta_slow",
    ), _positive_number_field()),
    "original_max_position_embeddings": _integer_field(1, MAX_POSITIONS),
    "partial_rotary_factor": _positive_number_field(1.0),
    "short_factor": Field("numbers", _SMALL, 1e30),
    "long_factor": Field("numbers", _SMALL, 1e30),
    **dict.fromkeys(("alpha", "short_mscale", "long_mscale"), _positive_number_field()),
    "llama_4_scaling_beta": Field("number", 0.0, 1e30),
    "mscale": Field("number", 0.0, 1e30),
    "mscale_all_dim": Field("number", 0.0, 1e30),
    "truncate": _FLAG,
    "mrope_section": Field("wholes", 0, 1 << 16),
    "full_attention": _OBJECT,
    "sliding_attention": _OBJECT,
}  # fmt: skip
# Fields of generation_config.json.
GENERATION: Mapping[str, Field] = {"eos_token_id": _IDS}
# Fields of tokenizer_config.json; its special tokens, texts or objects with a `content`, are
# checked elsewhere.
TOKENIZER: Mapping[str, Field] = {"add_bos_token": _FLAG}
# Metadata keys of a GGUF file; keys that begin with a dot are prefixed by the architecture's name.
GGUF: Mapping[str, Field] = {
    **dict.fromkeys((
        "general.architecture", ".rope.scaling.type", "tokenizer.ggml.model", "tokenizer.ggml.pre",
        "tokenizer.chat_template",
    ), _TEXT),
    **dict.fromkeys((
        ".attention.head_count", ".attention.key_length",
        ".attention.key_length_mla", ".attention.value_length_mla",
    ), _integer_field(1, 1 << 16)),
    ".attention.head_count_kv": Field("wholes", 0, 1 << 16),  # one number, or one per layer
    ".shortconv.l_cache": _integer_field(1, 64),
    ".attention.layer_norm_rms_epsilon": Field("number", 0.0, 1.0),
    ".attention.layer_norm_epsilon": Field("number", 0.0, 1.0),
    **dict.fromkeys((
        ".attention.clamp_kqv", ".rope.freq_base", ".rope.scaling.factor", ".attention.scale",
        ".embedding_scale", ".residual_scale", ".logit_scale", ".attn_logit_softcapping",
        ".final_logit_softcapping", ".rope.scaling.yarn_attn_factor", ".rope.scaling.yarn_beta_fast",
        ".rope.scaling.yarn_beta_slow",
    ), _positive_number_field()),
    **dict.fromkeys((
        ".use_parallel_residual", ".expert_weights_norm", "tokenizer.ggml.add_bos_token",
        "tokenizer.ggml.add_space_prefix",
    ), _FLAG),
    **dict.fromkeys((
        ".embedding_length", ".attention.q_lora_rank", ".attention.kv_lora_rank",
    ), _integer_field(1, 1 << 20)),
    **dict.fromkeys((
        ".feed_forward_length", ".expert_feed_forward_length", ".expert_shared_feed_forward_length",
    ), _integer_field(1, 1 << 24)),
    ".block_count": _integer_field(1, 10_000),
    ".context_length": _integer_field(1, MAX_POSITIONS),
    ".rope.dimension_count": _integer_field(2, 1 << 16),
    ".attention.sliding_window": _integer_field(0, MAX_POSITIONS),
    **dict.fromkeys((
        ".expert_count", ".expert_used_count", ".expert_group_count", ".expert_group_used_count",
    ), _integer_field(1, MAX_EXPERTS)),
    ".expert_shared_count": _integer_field(0, MAX_EXPERTS),
    ".expert_weights_scale": Field("number", 0.0, 1e30),
    ".expert_gating_func": _integer_field(0, 255),
    ".leading_dense_block_count": _integer_field(0, MAX_POSITIONS),
    ".nextn_predict_layers": _integer_field(0, 10_000),
    ".rope.scaling.original_context_length": _integer_field(1, MAX_POSITIONS),
    ".rope.scaling.yarn_ext_factor": Field("number", -1e30, 1e30),
    ".rope.scaling.yarn_log_multiplier": Field("number", 0.0, 1e30),
    "tokenizer.ggml.tokens": Field("texts", required=True),
    "tokenizer.ggml.merges": Field("texts"),
    "tokenizer.ggml.scores": Field("numbers"),
    "tokenizer.ggml.token_type": Field("wholes"),
    **{f"tokenizer.ggml.{name}_token_id": _ID for name in ("bos", "eos", "eot", "unknown", "padding")},
}  # fmt: skip


def check(
    content: Mapping[str, Json], fields: Mapping[str, Field], source: str, *, prefix: str = ""
) -> None:
    """Checks the type and range of all fields that are present.

    Args:
        content: content of the file.
        fields: fields to check, by name.
        source: name of the file, for messages.
        prefix: text put before names that begin with a dot.

    Raises:
        ModelError: a required field is missing, or a field has a wrong type or is out of range.
    """
    for name, field in fields.items():
        key = prefix + name if name.startswith(".") else name
        value = content.get(key)
        if value is None:
            if field.required:
                raise ModelError(
                    f"{source}: the field {key!r} is missing.",
                    hint="Correct it, or fetch the file again.",
                )
        elif problem := field.problem(value):
            raise ModelError(
                f"{source}: `{key}`: {abbreviate(value)} {problem}.",
                hint="Correct it, or fetch the file again.",
            )


def parse_token_ids(ids: object, vocab_size: int, source: str, name: str) -> frozenset[int]:
    """Returns the token ids in a field, which holds one id, several or none.

    Raises:
        ModelError: an id is not an integer below `vocab_size`.
    """
    found = frozenset(
        ids if isinstance(ids, list | tuple | set | frozenset) else () if ids is None else (ids,)
    )
    for token in found:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ModelError(
                f"{source}: `{name}`: {abbreviate(token)} is no id of the {vocab_size:,} tokens.",
                hint="Correct it, or fetch the file again.",
            )
    return found


def read_json(path: Path) -> dict[str, Json]:
    """Returns the object in a JSON file.

    Raises:
        ModelError: the file is not a regular file, is too large, can't be read, or does not hold a
            JSON object.
    """
    content = read_any_json(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not a JSON object.", hint="Fetch the file again.")
    return content


def read_any_json(path: Path) -> Json:
    """Returns the content of a JSON file. Raises ModelError if the file can't be read or is not
    JSON.
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}", hint="Fetch the file again.") from error
    except RecursionError:
        raise ModelError(f"{path}: nested too deeply.", hint="Fetch the file again.") from None


def read_text(path: Path) -> str:
    """Returns the text of a UTF-8 file. Raises ModelError if the file is not regular, is too large
    or can't be read.
    """
    try:
        if not path.exists():
            raise ModelError(f"{path}: is not there.", hint="Fetch the file again.")
        if not path.is_file():  # reading from a pipe would block for ever
            raise ModelError(f"{path}: not a regular file.", hint="Replace it by the file itself.")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ModelError(
                f"{path}: {size:,} bytes; the limit is {MAX_BYTES:,}.", hint="Fetch the file again."
            )
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: can't be read: {error}", hint="Fetch the file again.") from error


def abbreviate(value: object) -> str:
    """Formats a value for a message, shortened if it is long."""
    if isinstance(value, list) and len(value) > 8:
        return f"a list of {len(value):,}"
    if isinstance(value, int) and value.bit_length() > 512:
        return "a huge number"
    try:
        text = repr(value)
    # the value is nested too deeply, or contains a huge number
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}…"
