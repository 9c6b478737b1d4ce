"""Loads encoders: models that read texts and return embeddings, scores or classes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.config_checks import check_unset
from sglang_lite.runtime.embedding.encoder import Encoder
from sglang_lite.runtime.embedding.spec import EncoderSpec, encoder_spec
from sglang_lite.runtime.embedding.tokenizer import encoder_tokenizer
from sglang_lite.runtime.models.memory_check import check_free_memory, weight_bytes
from sglang_lite.runtime.models.spec import ModelSpec
from sglang_lite.runtime.models.weights.dummy import DummySource
from sglang_lite.runtime.models.weights.folder import open_weight_folder
from sglang_lite.runtime.models.weights.load_format import open_weights
from sglang_lite.runtime.models.weights.quantised_formats import read_quantisation
from sglang_lite.runtime.models.weights.source import WeightSource
from sglang_lite.runtime.tokens.tokenizer import Tokenizer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_GENERATION = {
    "quantization", "kv_dtype", "context_length", "max_total_tokens", "max_running", "page_size",
    "special_tokens_in_roles", "skip_tokenizer_init", "prefix_cache", "policy", "eviction", "deterministic",
    "original_logprobs", "attention_backend", "overlap", "jump_forward", "speculation", "draft_tokens",
    "draft_capacity", "draft_context", "cuda_graphs",
    "mem_fraction", "cpu_offload_gb", "enable_memory_saver", "enable_weights_cpu_backup",
    "refuse_while_asleep", "enable_hierarchical_cache", "quantization_param_path",
    "enable_return_routed_experts", "enable_return_hidden_states", "expert_distribution_recorder_mode",
    "enable_layerwise_nvtx_marker", "debug_tensor_dump_output_folder", "debug_tensor_dump_layers",
    "constraint_backend", "compile_timeout_s", "compile_memory_mb", "seed",
}  # fmt: skip

_MEDIA = ("encoder_only", "language_only", "encoder_urls")


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """Encoder with its tokenizer.

    Attributes:
        name: value of the engine's `model` setting.
        model: encoder with loaded weights.
        tokenizer: tokenizer of the encoder.
    """

    name: str
    model: Encoder
    tokenizer: Tokenizer


def load_encoder(
    config: EngineConfig,
    path: Path,
    device: torch.device,
    progress: Callable[[Iterable[int]], Iterable[int]],
) -> LoadedEncoder:
    """Loads an encoder and its tokenizer from the model folder at `path`.

    Args:
        config: configuration of the engine.
        path: folder of the model.
        device: device that the model runs on.
        progress: wraps the iteration over layers while they are loaded.

    Raises:
        ModelError: the model is damaged or not supported.
        ParameterError: a setting does not apply to models that read texts.
    """
    reject_generation_settings(config, _MEDIA)
    if config.model_impl == "transformers" or config.load_format == "gguf":
        name = "model_impl" if config.model_impl == "transformers" else "load_format"
        raise ParameterError(
            name, f"{getattr(config, name)!r} is for models that generate text.", hint='Use "auto".'
        )
    dtype = encoder_dtype(config, device)
    spec = encoder_spec(path)
    tokenizer = encoder_tokenizer(path, spec)
    if isinstance(spec.layers, ModelSpec):
        if device.type != "cpu":
            raise ModelError(
                f"{path}: {spec.architecture} reads texts by a decoder's layers, and those run so on a CPU only.",
                hint='Use device="cpu".',
            )
        hint = "Take a smaller model or dtype."
        check_free_memory(
            {"weights": weight_bytes(spec.layers, dtype.itemsize)}, device, str(path), hint
        )
    with torch.inference_mode():
        model = Encoder(
            spec, *_open_weight_sources(config, path, spec, device), dtype, device, progress
        )
    return LoadedEncoder(config.model, model, tokenizer)


def reject_generation_settings(config: EngineConfig, also: Collection[str] = ()) -> None:
    """Raises ParameterError if the config sets an option that applies only to models that generate
    text, or an option named in `also`.
    """
    # Without a cache, explain_cache_misses=False always holds.
    unused = {
        *_GENERATION,
        *also,
        *(("explain_cache_misses",) if config.explain_cache_misses else ()),
    }
    check_unset(config, unused, "is for models that generate text.", "Leave it out.")


def encoder_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Returns the dtype that the encoder computes in. Raises ParameterError if the configured one
    is not supported.
    """
    if config.dtype not in ("auto", *_DTYPES):
        raise ParameterError(
            "dtype", f"{config.dtype} is for models that generate text.", hint="Use float32."
        )
    return _DTYPES.get(config.dtype, torch.bfloat16 if device.type == "cuda" else torch.float32)


def _open_weight_sources(
    config: EngineConfig, path: Path, spec: EncoderSpec, device: torch.device
) -> tuple[WeightSource, list[WeightSource]]:
    """Returns the sources of the weights: one for the model, and one for each dense layer."""
    if config.load_format == "dummy":
        return DummySource(device), [DummySource(device) for _ in spec.dense]
    declared = read_quantisation(path)
    source = open_weights(
        path, config.model, config.load_format, declared.matrices, threads=config.load_threads
    )
    declared.check_checkpoint(source)
    return source, [open_weight_folder(layer.folder) for layer in spec.dense]
