"""Reading of a GGUF file's metadata as the specification of a decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models import config_fields
from sglang_lite.runtime.models.config_fields import Json
from sglang_lite.runtime.models.spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, RopeSpec


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
    if arch not in ("llama", "qwen2", "qwen3"):
        raise ModelError(
            f"{source}: GGUF architecture {arch!r} is not supported.", hint="Supported: llama, qwen2, qwen3."
        )
    try:
        eos = metadata.get("tokenizer.ggml.eos_token_id")
        layer = LayerSpec(
            _attention(metadata, arch, tensors, source), DenseSpec(metadata[f"{arch}.feed_forward_length"])
        )
        return ModelSpec(
            architecture=arch,
            vocab_size=len(metadata["tokenizer.ggml.tokens"]),
            hidden_size=metadata[f"{arch}.embedding_length"],
            max_positions=metadata[f"{arch}.context_length"],
            rms_eps=metadata[f"{arch}.attention.layer_norm_rms_epsilon"],
            layers=(layer,) * metadata[f"{arch}.block_count"],
            tied_embeddings="output.weight" not in tensors,
            eos_ids=() if eos is None else (eos,),
            bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        )
    except KeyError as error:
        raise ModelError(f"{source}: the metadata key {error} is missing.") from error


def _attention(metadata: Mapping[str, Json], arch: str, tensors: frozenset[str], source: str) -> AttentionSpec:
    heads = metadata[f"{arch}.attention.head_count"]
    head_dim = metadata.get(f"{arch}.attention.key_length", metadata[f"{arch}.embedding_length"] // heads)
    rotary = metadata.get(f"{arch}.rope.dimension_count", head_dim)
    if head_dim < 1 or rotary % 2 or rotary > head_dim:
        raise ModelError(f"{source}: heads of {head_dim} numbers, of which {rotary} are turned in pairs, can't be.")
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    params: dict[str, Any] = {}
    if scaling not in ("none", "linear"):
        raise ModelError(f"{source}: GGUF rope scaling {scaling!r} is not supported.", hint="Use the HF folder.")
    if scaling == "linear":
        params["factor"] = metadata[f"{arch}.rope.scaling.factor"]
    kind = "linear" if scaling == "linear" else "default"
    return AttentionSpec(
        heads=heads,
        kv_heads=metadata.get(f"{arch}.attention.head_count_kv", heads),
        key_size=head_dim,
        value_size=head_dim,
        scale=head_dim**-0.5,
        rope=RopeSpec(metadata.get(f"{arch}.rope.freq_base", 10_000.0), kind, rotary, params),
        qk_norm="head" if "blk.0.attn_q_norm.weight" in tensors else "",
        qkv_bias="blk.0.attn_q.bias" in tensors,
    )
