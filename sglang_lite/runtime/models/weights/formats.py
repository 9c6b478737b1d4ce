"""Formats of a folder's weights that `load_format` chooses: which files they are in, and how those are read."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path, PurePath

import numpy as np
import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.config_fields import read_any_json, shown
from sglang_lite.runtime.models.weights.folder import (
    FolderSource,
    SafetensorsSource,
    TorchSource,
    pickled_tensors,
    weight_files,
)
from sglang_lite.runtime.models.weights.quantization_config import PLAIN, Matrices
from sglang_lite.runtime.models.weights.ranges import LocalRanges, RangeSource
from sglang_lite.runtime.models.weights.remote import RemoteRanges, is_address
from sglang_lite.runtime.models.weights.source import Weight, WeightSource

_SHARD = re.compile(r"model-rank-(\d+)-part-(\d+)\.safetensors")
_REMOTE_THREADS = 8  # a request waits for the network most of the time
_NUMPY = "np"  # folder beside the weights


def shard_name(rank: int, part: int) -> str:
    """Name of a file of `sharded_state`, as vLLM and SGLang have it."""
    return f"model-rank-{rank}-part-{part}.safetensors"


def open_weights(
    folder: Path, model: str, load_format: str, matrices: Matrices = PLAIN, *, threads: int = 1, pinned: bool = False
) -> WeightSource:
    """Opens the weights of a model.

    Args:
        folder: folder of the model, or of the copy of what describes it if it is at an address.
        model: name, path or address of the model.
        load_format: "auto" for safetensors, else `.bin`; "safetensors"; "pt" for pickled tensors; "npcache" for a copy
            of those in NumPy's format, which is made at the first time; "sharded_state" for files of ranks; "remote"
            for safetensors at an address.
        matrices: how its matrices are declared to be stored.
        threads: number of threads that read safetensors.
        pinned: whether these read to pinned memory.

    Raises:
        ModelError: the model has no weights in this format, or a file is missing or damaged.
    """
    ranges: LocalRanges | RemoteRanges = LocalRanges()
    if is_address(model):
        if load_format not in ("auto", "remote", "safetensors"):
            raise ModelError(f"{model}: load_format is {load_format!r}, and an address has safetensors.")
        ranges = RemoteRanges(model, folder)
        files = weight_files(folder, ("safetensors",), ranges.has)[1]
        return RangeSource(folder, files, matrices, ranges, max(threads, _REMOTE_THREADS), pinned=pinned)
    match load_format:
        case "remote":
            raise ModelError(f"{model}: load_format is 'remote', and this is no address.", hint='Use "auto".')
        case "auto" | "safetensors":
            kind, files = weight_files(folder, ("safetensors", "bin") if load_format == "auto" else ("safetensors",))
            if threads > 1 and kind == "safetensors":
                return RangeSource(folder, files, matrices, ranges, threads, pinned=pinned)
            return (SafetensorsSource if kind == "safetensors" else TorchSource)(folder, files, matrices)
        case "pt":
            return TorchSource(folder, _pickles(folder), matrices)
        case "npcache":
            return NumpySource(folder, _numpy_files(folder), matrices)
        case "sharded_state":
            return RangeSource(folder, _shards(folder), matrices, ranges, threads, pinned=pinned)
        case "gguf":
            kind = weight_files(folder)[0]
            raise ModelError(f"{folder}: load_format is 'gguf', and this is {kind}.", hint='Use "auto".')
    raise AssertionError(load_format)


def check_gguf(load_format: str, path: Path) -> None:
    """Raises ModelError if a GGUF file is to be read in another format."""
    if load_format not in ("auto", "gguf", "dummy"):
        raise ModelError(f"{path}: load_format is {load_format!r}, and this is gguf.", hint='Use "auto".')


def _pickles(folder: Path) -> set[Path]:
    """Files of pickled tensors: `pytorch_model.bin`, or its shards, or `.pt` files."""
    try:
        return weight_files(folder, ("bin",))[1]
    except ModelError:
        if found := {path for path in folder.glob("*.pt") if path.is_file()}:
            return found
        raise


def _shards(folder: Path) -> set[Path]:
    found = {path: match for path in folder.iterdir() if (match := _SHARD.fullmatch(path.name))}
    ranks = {int(match[1]) for match in found.values()}
    if not found:
        raise ModelError(
            f"{folder}: there is no {shard_name(0, 0)}.", hint="`sglang-lite save MODEL --sharded --out DIR` writes it."
        )
    if ranks != {0}:
        raise ModelError(
            f"{folder}: the files are for ranks up to {max(ranks)}, and this engine has one.",
            hint="Save the model for one rank: `sglang-lite save MODEL --sharded --out DIR`.",
        )
    parts = {int(match[2]) for match in found.values()}
    if missing := sorted(set(range(max(parts) + 1)) - parts):
        raise ModelError(f"{folder}: {shard_name(0, missing[0])} is missing ({len(missing)} of {max(parts) + 1}).")
    return set(found)


class NumpySource(FolderSource):
    """Source of tensors in NumPy's format, a file each. Unpickles nothing."""

    def _names(self, file: Path) -> list[str]:
        return [file.name]

    def _tensor(self, name: str, file: Path) -> torch.Tensor:
        try:
            return torch.from_numpy(np.load(file, allow_pickle=False))
        except (OSError, ValueError, EOFError, TypeError) as error:
            raise ModelError(f"{file}: damaged: {error}", hint=f"Remove the folder {file.parent}.") from error

    def _plain(self, name: str, file: Path) -> Weight:
        return self._tensor(name, file)


def _numpy_files(folder: Path) -> set[Path]:
    """Files of the copy in NumPy's format, which is made unless it is there."""
    copy = folder / _NUMPY
    index = copy / "weight_names.json"
    if not index.exists():
        _write_numpy(_pickles(folder), copy, index.name)
    names = read_any_json(index)
    if not isinstance(names, list):
        raise ModelError(f"{index}: not a list of names.", hint=f"Remove the folder {copy}.")
    for name in names:
        if not isinstance(name, str) or len(PurePath(name).parts) != 1 or name in (".", "..") or "\0" in name:
            raise ModelError(f"{index}: names {shown(name)}, which is no file of the folder.")
        if not (copy / name).is_file():
            raise ModelError(f"{copy}: the file {name} is missing.", hint=f"Remove the folder {copy}.")
    return {copy / name for name in names}


def _write_numpy(files: set[Path], copy: Path, index: str) -> None:
    names = []
    try:
        with tempfile.TemporaryDirectory(prefix=".np-", dir=copy.parent) as scratch:
            written = Path(scratch, _NUMPY)
            written.mkdir()
            for file in sorted(files):
                for name, tensor in pickled_tensors(file).items():
                    # NumPy has no bfloat16, whose numbers are float32's, too.
                    plain = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
                    with open(written / name, "wb") as out:
                        np.save(out, plain.numpy(), allow_pickle=False)
                    names.append(name)
            (written / index).write_text(json.dumps(names))
            os.replace(written, copy)
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"{copy}: the copy in NumPy's format can't be made: {error}", hint='Use load_format="pt".'
        ) from error
