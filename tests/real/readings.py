"""How transformers reads a GGUF file: the oracle for real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def read_by_transformers(file: Path, dtype: str = "float32") -> tuple[Any, Any]:
    """Returns a file's model, with its weights as numbers of `dtype`, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
    )
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
