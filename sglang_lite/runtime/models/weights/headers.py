"""Headers of a checkpoint's files: name, shape and format of each tensor. No weights are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.read_gguf import spec_from_gguf
from sglang_lite.runtime.models.weights.folder import (
    find_packed_matrices,
    merge_packed_names,
    pickled_tensors,
    weight_files,
)
from sglang_lite.runtime.models.weights.gguf import LatentHeads, named_tensors
from sglang_lite.runtime.models.weights.gguf_file import GgufFile, GgufTensor
from sglang_lite.runtime.models.weights.packing import Packing
from sglang_lite.runtime.models.weights.ranges import DTYPES, LocalRanges, read_header
from sglang_lite.runtime.models.weights.source import Stored, Weight, WeightSource, canonical_name

if TYPE_CHECKING:
    from huggingface_hub import SafetensorsRepoMetadata


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a stored tensor.

    Attributes:
        shape: shape of the tensor.
        format: name of the number format in the file.
        dtype: torch's dtype of the numbers, or None if torch has none.
        size: size in bytes.
        file: file that holds the tensor.
    """

    shape: tuple[int, ...]
    format: str
    dtype: torch.dtype | None
    size: int
    file: Path


Headers: TypeAlias = Mapping[str, Header]  # by canonical tensor name


def read_headers(path: Path) -> Headers:
    """Returns the headers of all tensors of the GGUF file or folder at `path`.

    Raises:
        ModelError: no weights are found, or a file is damaged.
    """
    if path.is_file():
        return _gguf_headers(GgufFile(path))
    kind, files = weight_files(path)
    read = _safetensors_headers if kind == "safetensors" else _pickle_headers
    return {
        canonical_name(name): header
        for file in sorted(files)
        for name, header in read(file).items()
    }


def headers_from_hub_metadata(repository: SafetensorsRepoMetadata, folder: Path) -> Headers:
    """Returns the headers of all tensors in a repository, from the metadata that the hub provides.

    Args:
        repository: metadata of the repository's safetensors files.
        folder: path that stands for the repository in messages.
    """
    return {
        canonical_name(name): _header(each.shape, each.dtype, each.data_offsets, folder / file)
        for file, content in repository.files_metadata.items()
        for name, each in content.tensors.items()
    }


def _gguf_headers(file: GgufFile) -> Headers:
    try:
        tensors: Mapping[str, GgufTensor | LatentHeads] = named_tensors(
            file, spec_from_gguf(file.metadata, frozenset(file.tensors), str(file.path))
        )
    except ModelError:  # is reported when the model itself is read
        tensors = file.tensors
    return {
        name: Header(each.shape, each.kind, torch.float32, each.size, file.path)
        for name, each in tensors.items()
    }


def _safetensors_headers(file: Path) -> Headers:
    found = read_header(LocalRanges(), file)
    return {
        name: _header(list(each.shape), each.format, (each.start, each.end), file)
        for name, each in found.items()
    }


def _header(shape: list[int], format: str, offsets: tuple[int, int], file: Path) -> Header:
    return Header(tuple(shape), format, DTYPES.get(format), offsets[1] - offsets[0], file)


def _pickle_headers(file: Path) -> Headers:
    return {
        name: Header(
            tuple(each.shape), str(each.dtype).removeprefix("torch."), each.dtype, each.nbytes, file
        )
        for name, each in pickled_tensors(file, "meta").items()
    }


class HeaderSource(WeightSource):
    """Source of tensors without values. Used to check that a checkpoint has all the tensors that a
    model needs.

    Attributes:
        elements: number of elements of all tensors taken so far.
        in_8_bits: number of these elements that are stored in 8-bit floating point.
        packed: number of these elements by the packing of their matrix.
    """

    def __init__(self, label: str, headers: Headers, packings: Sequence[Packing] = ()) -> None:
        files = {name: header.file for name, header in headers.items()}
        self._packed = find_packed_matrices(label, files, packings)
        super().__init__(label, merge_packed_names(files, self._packed))
        self._headers = headers
        self.elements = self.in_8_bits = 0
        self.packed: Counter[Packing] = Counter()

    @property
    def has_packed_matrices(self) -> bool:
        return bool(self._packed)

    def take_tensor_or_stack(self, name: str, shape: tuple[int, ...]) -> Stored:
        if name in self._packed and self.has_tensor(name):  # none of its tensors has its shape
            self.ignore_tensor(name)
            found = torch.empty(shape, device="meta")
            self.elements += found.numel()
            self.packed[self._packed[name].packing] += found.numel()
            return found
        return super().take_tensor_or_stack(name, shape)

    def _read_stored(self, name: str, file: Path) -> Weight:
        header = self._headers[name]
        if header.dtype is None:
            raise ModelError(
                f"{file}: {name} is stored as {header.format}, which is not supported.",
                hint="Use the unquantised checkpoint, or a GGUF file.",
            )
        found = torch.empty(header.shape, dtype=header.dtype, device="meta")
        self.elements += found.numel()
        if header.dtype != torch.float8_e4m3fn:
            return found
        self.in_8_bits += found.numel()
        scale = next(
            (other for other in (f"{name}_scale_inv", f"{name}_scale") if self.has_tensor(other)),
            None,
        )
        if scale is None:
            raise ModelError(
                f"{file}: {name} is in 8 bits, but {name}_scale or {name}_scale_inv is missing."
            )
        self.ignore_tensor(scale)
        return found.float()
