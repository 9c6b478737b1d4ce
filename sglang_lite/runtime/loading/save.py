"""Saves weights as folders of files for `load_format="sharded_state"`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sglang_lite.protocol import ModelError, ParameterError
from sglang_lite.runtime.loading.model_files import read_spec
from sglang_lite.runtime.loading.new_folder import copy_supporting_files, new_folder, write_tensors
from sglang_lite.runtime.models.parameters import parameters
from sglang_lite.runtime.models.resolve import resolve
from sglang_lite.runtime.models.sharding import RankPart, rank_part_of_parameter, rank_spec
from sglang_lite.runtime.models.spec import ModelSpec
from sglang_lite.runtime.models.weights.folder import pickled_tensors, weight_files
from sglang_lite.runtime.models.weights.rank_files import shard_name, stored_shard_name
from sglang_lite.runtime.models.weights.source import canonical_name
from sglang_lite.runtime.parallel.layout import Parallel

_PART_BYTES = 5 << 30


def save_sharded(
    model: str,
    out: Path,
    tp: int = 1,
    *,
    part_bytes: int = _PART_BYTES,
    progress: Callable[[Iterable[Path]], Iterable[Path]] = iter,
) -> None:
    """Writes a model's tensors to separate files for each rank, along with the files that describe
    the model. Splits the matrices in 16 or 32 bits that are divided among ranks. Everything else
    goes into the files of rank 0, stacked matrices included.

    Args:
        model: folder of safetensors or `.bin`, or hub id.
        out: folder to create.
        tp: number of ranks.
        part_bytes: size at which a file ends.
        progress: wraps the iterable of weight files, once for each rank.

    Raises:
        ModelError: the model is not a folder, or `out` can't be written.
        ParameterError: `out` already exists, or the model can't be cut for this many ranks.
    """
    folder = resolve(model)
    if not folder.is_dir():
        raise ModelError(
            f"{folder}: only folders are saved so.",
            hint='Load a GGUF file as it is: load_format="gguf".',
        )
    files = sorted(weight_files(folder)[1])
    parts = _find_rank_parts(folder, tp)
    with new_folder(out) as written:
        copy_supporting_files(folder, written)
        for index in written.glob("*.index.json"):
            index.unlink()
        for rank in range(tp):
            _write_rank_files(
                _rank_tensors(progress(files), parts, rank), written, rank, part_bytes
            )


def _find_rank_parts(folder: Path, tp: int) -> dict[str, list[RankPart]]:
    """Returns each rank's part of the matrices to split, by canonical name of the matrix. If
    several ranks hold the same part, only the first one writes it.

    Raises:
        ParameterError: the model can't be cut.
    """
    if tp < 1:
        raise ParameterError("--tp", f"{tp} is no number of ranks.", hint="Use 1 or more.")
    spec = None if tp == 1 else read_spec(folder)
    if spec is None:
        return {}
    if not isinstance(spec, ModelSpec):
        why = f"{spec.architecture} runs by transformers' code, which has one rank."
        raise ParameterError("--tp", why, hint="Leave it out.")
    found: dict[str, list[RankPart]] = {}
    ranks = [Parallel(tp=tp, rank=rank) for rank in range(tp)]
    rank_spec(spec, ranks[0], even=False)  # raises
    for each in parameters(spec):
        parts = [rank_part_of_parameter(each, spec, rank) for rank in ranks]
        for piece in each.slices:
            if None not in parts and len(piece.shape) == 2 and not piece.part:
                found[piece.name] = list(
                    _remove_part_overlaps([part for part in parts if part is not None])
                )
    return found


def _remove_part_overlaps(parts: Iterable[RankPart]) -> Iterator[RankPart]:
    """Yields the parts, shortened so that none repeats what an earlier part contains."""
    at = 0
    for part in parts:
        yield replace(part, start=min(max(part.start, at), part.stop))
        at = max(at, part.stop)


def _rank_tensors(
    files: Iterable[Path], parts: Mapping[str, Sequence[RankPart]], rank: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the name and the value of each tensor in a rank's files. Values stay as they are
    stored.
    """
    from safetensors import safe_open

    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 # no mapping
                    stored = handle.get_slice(name)
                    yield from _slice_rank_tensor(name, stored, stored.get_shape(), parts, rank)
        else:
            for name, tensor in pickled_tensors(file).items():
                yield from _slice_rank_tensor(name, tensor, tensor.shape, parts, rank)


def _slice_rank_tensor(
    name: str, whole: Any, shape: Sequence[int], parts: Mapping[str, Sequence[RankPart]], rank: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields a rank's slice of a tensor with its name, or nothing if other ranks' files have the
    tensor. A tensor whose shape is not the model's is kept whole, so that the file's reader can
    reject it.
    """
    own = parts.get(canonical_name(name))
    axis = int(own is not None and own[rank].axis == "inputs")
    if (
        own is None
        or len(shape) != 2
        or shape[axis] != own[-1].stop
        or whole[:0].dtype.itemsize < 2
    ):
        if rank == 0:
            yield name, whole[...]
    elif own[rank].size:
        at = slice(own[rank].start, own[rank].stop)
        every = slice(None)
        yield stored_shard_name(name, own[rank].axis), whole[(every, at) if axis else (at, every)]


def _write_rank_files(
    tensors: Iterable[tuple[str, torch.Tensor]], out: Path, rank: int, part_bytes: int
) -> None:
    parts = 0
    state = dict[str, torch.Tensor]()
    size = 0
    for name, tensor in tensors:
        # pickled tensors may share memory
        state[name] = tensor.clone(memory_format=torch.contiguous_format)
        size += tensor.nbytes
        if size >= part_bytes:
            write_tensors(state, out / shard_name(rank, parts))
            parts = parts + 1
            state = {}
            size = 0
    if state or not parts:
        write_tensors(state, out / shard_name(rank, parts))
