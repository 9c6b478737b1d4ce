"""Models of few weights, random ones or those of a model's first layers, that have its tokenizer,
chat template and ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from sglang_lite.runtime.models.weights.gguf_file import GgufFile

SIZES = {
    "block_count": 2, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
    "attention.head_count_kv": 2, "rope.dimension_count": 16,
}  # fmt: skip


def write(path: Path, model: Path) -> Path:
    """Writes a Llama of two layers beside the metadata of the GGUF file `model`: a token costs 1/20
    of the default model's.
    """
    metadata = GgufFile(model).metadata
    writer = _begun(path, metadata | {f"llama.{name}": size for name, size in SIZES.items()})
    draw = np.random.default_rng(0)
    size, inner = SIZES["embedding_length"], SIZES["feed_forward_length"]
    keys = SIZES["attention.head_count_kv"] * SIZES["rope.dimension_count"]
    shapes = {
        "token_embd": (metadata["llama.vocab_size"], size),
        "output": (metadata["llama.vocab_size"], size),
    }
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
    return _written(writer, path)


def first_layers(path: Path, model: Path, count: int, *, tokens: int | None = None) -> Path:
    """Writes a Llama's first layers, each tensor as the GGUF file `model` has it.

    Args:
        tokens: as many of the tokenizer's lists are kept, as other readers take seconds for all;
            None: all.
    """
    file = GgufFile(model)
    metadata = {
        name: value[:tokens] if isinstance(value, list) else value
        for name, value in file.metadata.items()
    }
    writer = _begun(path, metadata | {"llama.block_count": count})
    for name, tensor in file.tensors.items():
        if not name.startswith("blk.") or int(name.split(".")[1]) < count:
            kind = gguf.GGMLQuantizationType[tensor.kind]
            raw = np.ascontiguousarray(tensor.data())
            data = (
                raw if kind.name not in PLAIN else raw.view(PLAIN[kind.name]).reshape(tensor.shape)
            )
            writer.add_tensor(name, data, raw_dtype=kind)
    return _written(writer, path)


PLAIN = {"F32": np.float32, "F16": np.float16}


def _begun(path: Path, metadata: dict[str, Any]) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
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
    return writer


def _written(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
