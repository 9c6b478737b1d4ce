"""A model of few random weights that has another model's tokenizer, chat template and ids."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from sglang_lite.runtime.models.weights.gguf_file import GgufFile

SIZES = {
    "block_count": 2, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
    "attention.head_count_kv": 2, "rope.dimension_count": 16,
}  # fmt: skip


def write(path: Path, model: Path) -> Path:
    """Writes a Llama of two layers beside the metadata of the GGUF file `model`: a token costs 1/20 of the default model's."""
    metadata = GgufFile(model).metadata
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (metadata | {f"llama.{name}": size for name, size in SIZES.items()}).items():
        if key == "general.architecture":  # the writer's own
            continue
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    draw = np.random.default_rng(0)
    size, inner = SIZES["embedding_length"], SIZES["feed_forward_length"]
    keys = SIZES["attention.head_count_kv"] * SIZES["rope.dimension_count"]
    shapes = {"token_embd": (metadata["llama.vocab_size"], size), "output": (metadata["llama.vocab_size"], size)}
    for i in range(SIZES["block_count"]):
        shapes |= {
            f"blk.{i}.attn_q": (size, size), f"blk.{i}.attn_k": (keys, size), f"blk.{i}.attn_v": (keys, size),
            f"blk.{i}.attn_output": (size, size), f"blk.{i}.ffn_gate": (inner, size), f"blk.{i}.ffn_up": (inner, size),
            f"blk.{i}.ffn_down": (size, inner),
        }  # fmt: skip
    for name, shape in shapes.items():
        weights = 0.3 * draw.standard_normal(shape, np.float32)
        writer.add_tensor(f"{name}.weight", weights)
    for name in (
        "output_norm",
        *(f"blk.{i}.{norm}_norm" for i in range(SIZES["block_count"]) for norm in ("attn", "ffn")),
    ):
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
