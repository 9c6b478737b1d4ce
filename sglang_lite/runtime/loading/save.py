"""Folders of weights in the files of `load_format="sharded_state"`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.loading.new_folder import copy_description, new_folder, write_tensors
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.models.weights.folder import pickled_tensors, weight_files
from sglang_lite.runtime.models.weights.load_format import shard_name

_PART_BYTES = 5 << 30


def save_sharded(
    model: str,
    out: Path,
    *,
    part_bytes: int = _PART_BYTES,
    progress: Callable[[Iterable[Path]], Iterable[Path]] = iter,
) -> None:
    """Writes a model's tensors, as they are stored, to the files of one rank, beside what describes it.

    Args:
        model: folder of safetensors or `.bin`, or hub id.
        out: folder to be made.
        part_bytes: size at which a file ends.
        progress: wraps the files of weights.

    Raises:
        ModelError: the model is no folder, or `out` can't be written.
        ParameterError: `out` is there already.
    """
    folder = resolve(model)
    if not folder.is_dir():
        raise ModelError(f"{folder}: only folders are saved so.", hint='Load a GGUF file as it is: load_format="gguf".')
    files = progress(sorted(weight_files(folder)[1]))
    with new_folder(out) as written:
        copy_description(folder, written)
        for index in written.glob("*.index.json"):
            index.unlink()
        _write(_stored(files), written, part_bytes)


def _stored(files: Iterable[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of files as they are stored."""
    from safetensors import safe_open

    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as handle:
                yield from ((name, handle.get_tensor(name)) for name in handle.keys())  # noqa: SIM118 # no mapping
        else:
            yield from pickled_tensors(file).items()


def _write(tensors: Iterable[tuple[str, torch.Tensor]], out: Path, part_bytes: int) -> None:
    parts, state, size = 0, dict[str, torch.Tensor](), 0
    for name, tensor in tensors:
        state[name] = tensor.clone(memory_format=torch.contiguous_format)  # pickled ones may share memory
        size += tensor.nbytes
        if size >= part_bytes:
            write_tensors(state, out / shard_name(0, parts))
            parts, state, size = parts + 1, {}, 0
    if state or not parts:
        write_tensors(state, out / shard_name(0, parts))
