"""Opens weights that are to replace those of a running model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.config import EngineConfig
from sglang_lite.runtime.loading.model_files import read_spec, spec_of_gguf
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.transformers_config import TransformersSpec
from sglang_lite.runtime.models.weight_parts import WeightParts
from sglang_lite.runtime.models.weights.folder import TensorSource
from sglang_lite.runtime.models.weights.gguf import GgufSource
from sglang_lite.runtime.models.weights.gguf_file import GgufFile
from sglang_lite.runtime.models.weights.load_format import check_gguf_load_format, open_weights
from sglang_lite.runtime.models.weights.quantised_formats import PLAIN, read_quantisation
from sglang_lite.runtime.models.weights.ranges import LocalRanges, RangeSource
from sglang_lite.runtime.models.weights.source import WeightSource


def checkpoint_opener(
    config: EngineConfig, path: Path, model: Decoder
) -> Callable[[], WeightSource]:
    """Returns a function that opens the checkpoint at `path`, whose weights will replace those of
    `model`. It can be called repeatedly.

    Raises:
        ModelError: the checkpoint can't be read or has another architecture.
    """
    gguf = GgufFile(path) if path.is_file() else None
    spec = read_spec(path, config.model_impl) if gguf is None else spec_of_gguf(gguf)
    if isinstance(spec, TransformersSpec):
        raise ModelError(f"{path}: another architecture than the running model's.")
    current = asdict(model.spec)
    new = asdict(spec)
    if differing := [name for name in current if current[name] != new[name]]:
        raise ModelError(
            f"{path}: another architecture than the running model's: {', '.join(differing)} differ."
        )
    if gguf is not None:
        check_gguf_load_format(config.load_format, path)
        return lambda: GgufSource(gguf, spec)
    matrices = read_quantisation(path).matrices
    pinned = model.device.type == "cuda"
    return lambda: open_weights(
        path, config.model, config.load_format, matrices, threads=config.load_threads, pinned=pinned
    )


def tensors_opener(
    tensors: Mapping[str, torch.Tensor] | Path, model: Decoder, folder: Path | None
) -> Callable[[], WeightSource]:
    """Returns a function that opens some tensors of a checkpoint, which will replace those of
    `model`. It can be called repeatedly.

    Args:
        tensors: tensors by name, or a file in the format of safetensors.
        model: model whose weights they replace.
        folder: the model's files, which declare how its matrices are stored; None if it has none.
    """
    matrices = PLAIN if folder is None or folder.is_file() else read_quantisation(folder).matrices
    on_cpu = model.device.type == "cpu"
    if isinstance(tensors, Path):
        return lambda: RangeSource(
            tensors, {tensors}, matrices, LocalRanges(), 1, pinned=not on_cpu
        )
    # On a CPU, a part may be built from a tensor without copying.
    return lambda: TensorSource("the given tensors", tensors, matrices, copies=on_cpu)


def check_replacement_tensors(
    tensors: Mapping[str, torch.Tensor], model: Decoder, folder: Path | None
) -> None:
    """Checks the names, dtypes and shapes of tensors that will be sent for `model`.

    Args:
        tensors: tensors by name, without values.
        model, folder: same as for `tensors_opener`.

    Raises:
        ModelError: a tensor doesn't fit, or the model has no place for it.
    """
    source = tensors_opener(tensors, model, folder)()
    parts = WeightParts(model)
    for name in list(source.names):
        shape = parts.shape(name)
        if shape is not None and not source.has_packed_matrices:  # packed tensors have other shapes
            source.take_tensor_or_stack(name, shape)
        elif parts.key(name) is not None:
            source.ignore_tensor(name)
    source.check_all_used(model.unused_tensors)
