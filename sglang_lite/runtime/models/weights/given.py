"""Tensors that a caller passes to a running engine: checks, unpacks and writes them to shared
memory.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from sglang_lite.errors import short_repr
from sglang_lite.protocol import ParameterError

_MEMORY = Path("/dev/shm")  # files of this folder are in memory


def in_memory_folder() -> Path | None:
    """Returns a folder whose files are in memory, or None for the default folder of temporary
    files.
    """
    return _MEMORY if _MEMORY.is_dir() else None


def write_shared_file(tensors: Mapping[str, torch.Tensor]) -> Path:
    """Writes tensors in the safetensors format to a file in shared memory that only this user may
    read.

    Tensors that share memory, such as a tied head and embedding, are written separately.

    Raises:
        ParameterError: there is too little space.
    """
    handle, name = tempfile.mkstemp(".safetensors", "sglang_lite-", in_memory_folder())
    os.close(handle)
    path = Path(name)
    try:
        write_tensors(tensors, path)
    except ParameterError:
        path.unlink()
        raise
    return path


def write_tensors(
    tensors: Mapping[str, torch.Tensor], path: Path, parameter: str = "named_tensors"
) -> None:
    """Writes tensors to a file in the safetensors format. Raises ParameterError if there is too
    little space. The error names the parameter that the tensors came in.
    """
    try:
        save_file(_without_shared_memory(tensors), path)
    except (SafetensorError, OSError) as error:
        raise ParameterError(parameter, f"can't be written to {path.parent}: {error}") from error


def _without_shared_memory(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies tensors to the host so that no two of them share memory."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        on_host = tensor.detach().cpu().contiguous()
        memory = on_host.untyped_storage().data_ptr()
        found[name] = on_host.clone() if memory in seen else on_host
        seen.add(memory)
    return found


def validate_named_tensors(
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    parameter: str = "named_tensors",
) -> dict[str, torch.Tensor]:
    """Returns tensors by name. Raises ParameterError if an entry is not a pair of a name and a
    tensor, a name occurs twice, or there are no tensors. The error names the parameter that the
    tensors came in.
    """
    pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    found: dict[str, torch.Tensor] = {}
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise ParameterError(parameter, f"{short_repr(pair)} is not a name with a tensor.")
        name, tensor = pair
        if not isinstance(tensor, torch.Tensor):
            raise ParameterError(parameter, f"{name!r} is {short_repr(tensor)}, and not a tensor.")
        if name in found:
            raise ParameterError(parameter, f"{name!r} is given twice.")
        found[name] = tensor.detach()
    if not found:
        raise ParameterError(parameter, "is empty.")
    return found


def unpack_flattened_bucket(bucket: Any) -> list[tuple[str, torch.Tensor]]:  # of the caller
    """Returns the names and tensors in SGLang's flattened bucket. The bucket holds the data of all
    tensors in one, and metadata with the name, dtype, shape and range of each. Raises
    ParameterError if the argument is not such a bucket.
    """
    parts = dict(bucket)
    flat = parts.get("flattened_tensor")
    metadata = parts.get("metadata")
    if not isinstance(flat, torch.Tensor) or metadata is None:
        raise ParameterError(
            "named_tensors", "a flattened bucket has a flattened_tensor and its metadata."
        )
    data = flat.flatten().view(torch.uint8)
    found = []
    for each in metadata:
        said = each if isinstance(each, Mapping) else vars(each)
        dtype = getattr(torch, str(said["dtype"]).removeprefix("torch."))
        size = flat.dtype.itemsize
        shape = tuple(said["shape"])
        start = said["start_idx"] * size
        end = said["end_idx"] * size
        if (
            not 0 <= start <= end <= len(data)
            or (end - start) != torch.Size(shape).numel() * dtype.itemsize
        ):
            raise ParameterError("named_tensors", f"{said['name']!r} is not within its bucket.")
        found.append((said["name"], data[start:end].view(dtype).view(shape)))
    return found
