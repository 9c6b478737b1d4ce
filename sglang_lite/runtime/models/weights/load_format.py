"""Formats of a folder's weights, chosen by `load_format`: which files hold the weights, and how
they are read.
"""

from __future__ import annotations

from pathlib import Path

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.weights.folder import (
    KINDS,
    SafetensorsSource,
    TorchSource,
    index_file_name,
    pickle_files,
    weight_files,
)
from sglang_lite.runtime.models.weights.mistral import MistralSource, mistral_files
from sglang_lite.runtime.models.weights.numpy_copy import NumpySource, prepare_numpy_files
from sglang_lite.runtime.models.weights.quantised_formats import PLAIN, Matrices
from sglang_lite.runtime.models.weights.ranges import LocalRanges, RangeSource
from sglang_lite.runtime.models.weights.rank_files import RankFilesSource, rank_files
from sglang_lite.runtime.models.weights.remote import RemoteRanges, is_address
from sglang_lite.runtime.models.weights.source import WeightSource

_REMOTE_THREADS = 8  # a request waits for the network most of the time


def open_weights(
    folder: Path,
    model: str,
    load_format: str,
    matrices: Matrices = PLAIN,
    *,
    threads: int = 1,
    pinned: bool = False,
) -> WeightSource:
    """Opens the weights of a model.

    Args:
        folder: folder of the model, or of the copied description if the model is at an address.
        model: name, path or address of the model.
        load_format: "auto" for safetensors, else `.bin`; "safetensors"; "pt" for pickled tensors;
            "npcache" for a copy of the pickled tensors in NumPy's format, made on first use;
            "sharded_state" for files of ranks; "mistral" for `consolidated*.safetensors`; "remote"
            for safetensors at an address.
        matrices: how its matrices are declared to be stored.
        threads: number of threads that read safetensors.
        pinned: whether the threads read into pinned memory.

    Raises:
        ModelError: the model has no weights in this format, or a file is missing or damaged.
    """
    ranges: LocalRanges | RemoteRanges = LocalRanges()
    if is_address(model):
        if load_format not in ("auto", "remote", "safetensors"):
            raise ModelError(
                f"{model}: load_format is {load_format!r}, and an address has safetensors."
            )
        ranges = RemoteRanges(model, folder)
        files = weight_files(folder, ("safetensors",), ranges.has_remote_file)[1]
        return RangeSource(
            folder, files, matrices, ranges, max(threads, _REMOTE_THREADS), pinned=pinned
        )
    match load_format:
        case "remote":
            raise ModelError(
                f"{model}: load_format is 'remote', and this is no address.", hint='Use "auto".'
            )
        case "auto" | "safetensors":
            kind, files = weight_files(folder, KINDS if load_format == "auto" else ("safetensors",))
            if kind == "safetensors" and (threads > 1 or not pinned):
                return RangeSource(folder, files, matrices, ranges, threads, pinned=pinned)
            return (SafetensorsSource if kind == "safetensors" else TorchSource)(
                folder, files, matrices
            )
        case "pt":
            return TorchSource(folder, pickle_files(folder), matrices)
        case "npcache":
            return NumpySource(folder, prepare_numpy_files(folder), matrices)
        case "sharded_state":
            return RankFilesSource(
                folder, rank_files(folder), matrices, ranges, threads, pinned=pinned
            )
        case "mistral":
            return MistralSource(folder, matrices, threads, pinned=pinned)
        case "remote_instance":
            raise ModelError(
                f"{model}: load_format 'remote_instance' is for the start of an engine that generates."
            )
        case "gguf":
            kind = weight_files(folder)[0]
            raise ModelError(
                f"{folder}: load_format is 'gguf', and this is {kind}.", hint='Use "auto".'
            )
    raise AssertionError(load_format)


def list_files_to_read(folder: Path, load_format: str) -> set[Path]:
    """Returns the files that `open_weights` reads in a folder, including indexes. Raises ModelError
    in the same cases.
    """
    match load_format:
        case "auto" | "safetensors" | "remote" | "gguf":
            kind, files = weight_files(
                folder, ("safetensors",) if load_format == "safetensors" else KINDS
            )
        case "pt":
            kind = "bin"
            files = pickle_files(folder)
        case "npcache":
            return prepare_numpy_files(folder, with_list=True)
        case "sharded_state":
            return rank_files(folder)
        case "mistral":
            return mistral_files(folder)
        case _:
            return set()
    return files | {each for each in (folder / index_file_name(kind),) if each.exists()}


def check_gguf_load_format(load_format: str, path: Path) -> None:
    """Raises ModelError if a GGUF file is to be read in another format."""
    if load_format not in ("auto", "gguf", "dummy"):
        raise ModelError(
            f"{path}: load_format is {load_format!r}, and this is gguf.", hint='Use "auto".'
        )
