"""Loading an encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path

import torch

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.encoding.encoder import Encoder
from sglang_lite.runtime.encoding.spec import encoder_spec
from sglang_lite.runtime.models.weights.dummy import DummySource
from sglang_lite.runtime.models.weights.folder import open_folder
from sglang_lite.runtime.tokens.from_folder import word_tokenizer_from_folder
from sglang_lite.runtime.tokens.tokenizer import Tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_GENERATION = {
    "quantization", "kv_dtype", "context_length", "max_total_tokens", "max_running", "page_size", "chat_template",
    "special_tokens_in_roles", "skip_tokenizer_init", "prefix_cache", "policy", "eviction", "deterministic",
    "original_logprobs", "attention_backend", "overlap", "jump_forward", "cuda_graphs", "mem_fraction",
    "constraint_backend", "compile_timeout_s", "compile_memory_mb", "seed",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An encoder and its tokenizer."""

    name: str
    model: Encoder
    tokenizer: Tokenizer


def load_encoder(
    config: EngineConfig, path: Path, device: torch.device, progress: Callable[[Iterable[int]], Iterable[int]]
) -> LoadedEncoder:
    """Loads the folder at `path`.

    Args:
        progress: gets the layers that are loaded and gives them back one by one.

    Raises:
        ModelError: damaged or not supported.
        ParameterError: a setting that such a model has no use for.
    """
    for each in fields(config):
        if each.name in _GENERATION and getattr(config, each.name) != each.default:
            raise ParameterError(each.name, "is for models that generate text.", hint="Leave it out.")
    if config.model_impl == "transformers" or config.load_format == "gguf":
        name = "model_impl" if config.model_impl == "transformers" else "load_format"
        raise ParameterError(name, f"{getattr(config, name)!r} is for models that generate text.", hint='Use "auto".')
    if config.dtype not in ("auto", *_DTYPES):
        raise ParameterError("dtype", f"{config.dtype} is for models that generate text.", hint="Use float32.")
    dtype = _DTYPES.get(config.dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)
    spec = encoder_spec(path)
    tokenizer = word_tokenizer_from_folder(path)
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelError(f"{path}: the tokenizer has {tokenizer.vocab_size:,} tokens, the model {spec.vocab_size:,}.")
    source = DummySource(device) if config.load_format == "dummy" else open_folder(path)
    with torch.inference_mode():
        model = Encoder(spec, source, dtype, device, progress)
    return LoadedEncoder(config.model, model, tokenizer)
