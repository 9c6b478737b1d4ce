"""Weights of a Hugging Face folder: safetensors or PyTorch `.bin`, in one file or sharded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.weights.source import WeightSource


def open_folder(folder: Path) -> WeightSource:
    """The weights in `folder`, safetensors before `.bin`.

    Raises:
        ModelError: no weights, a shard that is missing, or a file that is damaged.
    """
    for stem, suffix, reader in (
        ("model", "safetensors", SafetensorsSource),
        ("pytorch_model", "bin", TorchSource),
    ):
        index = folder / f"{stem}.{suffix}.index.json"
        single = folder / f"{stem}.{suffix}"
        if index.exists():
            return reader(folder, _shards(index))
        if single.exists():
            return reader(folder, {single})
    raise ModelError(
        f"{folder}: no weights found.",
        hint="Supported: model.safetensors, pytorch_model.bin (sharded too), or a .gguf file given by its path.",
    )


def _shards(index: Path) -> set[Path]:
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: not a weight index: {error!r}") from error
    missing = sorted(name for name in names if not (index.parent / name).exists())
    if missing:
        raise ModelError(f"{index.parent}: the shard {missing[0]} is missing ({len(missing)} of {len(names)}).")
    return {index.parent / name for name in names}


class SafetensorsSource(WeightSource):
    """Reads through a memory map: a tensor costs memory only while it is used."""

    def __init__(self, folder: Path, files: set[Path]) -> None:
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        for file in sorted(files):
            try:
                handle = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: damaged or truncated: {error}", hint="Fetch the file again.") from error
            names = handle.keys()  # type: ignore[no-untyped-call] # safetensors has no types
            self._files.update(dict.fromkeys(names, handle))
        super().__init__(str(folder), set(self._files))

    def _read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


class TorchSource(WeightSource):
    """Reads pickled tensors with `weights_only=True`: no code of the file is run."""

    def __init__(self, folder: Path, files: set[Path]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        for file in sorted(files):
            try:
                self._tensors.update(torch.load(file, map_location="cpu", weights_only=True, mmap=True))
            except Exception as error:  # torch raises many types for a file that is no checkpoint
                raise ModelError(f"{file}: can't be read as tensors: {error}") from error
        super().__init__(str(folder), set(self._tensors))

    def _read(self, name: str) -> torch.Tensor:
        return self._tensors.pop(name)
