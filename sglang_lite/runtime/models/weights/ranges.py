"""Source of safetensors whose byte ranges several threads can read, from local files or from
elsewhere (remote.py).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.config_fields import MAX_BYTES
from sglang_lite.runtime.models.weights.folder import FolderSource
from sglang_lite.runtime.models.weights.quantised_formats import Matrices
from sglang_lite.runtime.models.weights.source import PlainRows, Weight

# Formats of safetensors files. The engine can't use numbers of other formats.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
Bytes: TypeAlias = NDArray[np.uint8]
_PIECE = 1 << 22  # minimum number of bytes that one thread reads at a time


class Ranges(Protocol):
    """Files whose byte ranges can be read by several threads concurrently."""

    def size(self, file: Path) -> int: ...

    def read_bytes_into(self, file: Path, start: int, out: memoryview) -> None:
        """Fills `out` with bytes from `start` on. Raises OSError if there are fewer."""
        ...

    def read_rows(self, file: Path, start: int, stride: int, out: Bytes) -> None:
        """Fills each row of `out` [rows, bytes]: the first from `start` on, each of the others
        `stride` bytes after the one before.
        """
        ...


class LocalRanges:
    """Byte ranges of files on this machine."""

    def size(self, file: Path) -> int:
        return file.stat().st_size

    def read_bytes_into(self, file: Path, start: int, out: memoryview) -> None:
        with open(file, "rb", buffering=0) as opened:
            _read_until_full(opened.fileno(), start, out)

    def read_rows(self, file: Path, start: int, stride: int, out: Bytes) -> None:
        with open(file, "rb", buffering=0) as opened:
            for row in out:
                _read_until_full(opened.fileno(), start, row.data)
                start += stride


def _read_until_full(descriptor: int, start: int, out: memoryview) -> None:
    at = 0
    while at < len(out):
        count = os.preadv(descriptor, [out[at:]], start + at)
        if not count:
            raise OSError(f"it ends at {start + at:,}")
        at += count


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Header of a tensor in a file.

    Attributes:
        format: name of the number format.
        shape: shape.
        start, end: place in the file, in bytes.
    """

    format: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(ranges: Ranges, file: Path) -> Mapping[str, StoredTensor]:
    """Returns the headers of a safetensors file's tensors, by name. Raises ModelError if it is
    damaged or truncated.
    """
    try:
        size = ranges.size(file)
        prefix = bytearray(8)
        ranges.read_bytes_into(file, 0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > min(MAX_BYTES, size - 8):
            raise ValueError("its header is too long")
        text = bytearray(length)
        ranges.read_bytes_into(file, 8, memoryview(text))
        found = {}
        for name, each in json.loads(bytes(text)).items():
            if name != "__metadata__":
                if not isinstance(each["dtype"], str):
                    raise ValueError(f"{name} has no name of a format")
                if any(
                    type(number) is not int or number < 0
                    for number in (*each["shape"], *each["data_offsets"])
                ):
                    raise ValueError(f"{name} has no whole numbers as its shape and place")
                start, end = (8 + length + offset for offset in each["data_offsets"])
                if not 8 + length <= start <= end <= size:
                    raise ValueError(f"{name} is not within it")
                found[name] = StoredTensor(each["dtype"], tuple(each["shape"]), start, end)
        _check_no_gaps(found, 8 + length, size)
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{file}: damaged or truncated: {error}", hint="Fetch the file again."
        ) from error
    return found


def _check_no_gaps(tensors: Mapping[str, StoredTensor], start: int, end: int) -> None:
    """Checks that tensors follow one another from `start` to `end`, as the format requires. Raises
    ValueError if not.
    """
    for name, each in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if each.start != start:
            raise ValueError(
                f"{name} begins at byte {each.start:,}, and the tensor before it ends at {start:,}"
            )
        start = each.end
    if tensors and start != end:
        raise ValueError(f"its tensors end at byte {start:,}, and the file at {end:,}")


class RangeSource(FolderSource):
    """Source of the tensors of safetensors files, whose byte ranges are read concurrently.

    Args:
        folder, files, matrices: as for FolderSource.
        ranges: how bytes are read.
        threads: number of threads that read.
        pinned: whether numbers are read into pinned memory, from which copies to a GPU are faster.
        renamed: function from a tensor's name in these files to its name in Hugging Face's.
    """

    def __init__(
        self,
        folder: Path,
        files: set[Path],
        matrices: Matrices,
        ranges: Ranges,
        threads: int,
        *,
        pinned: bool,
        renamed: Callable[[str], str] = str,
    ) -> None:
        self._ranges = ranges
        self._threads = threads
        self._pinned = pinned
        self._renamed = renamed
        self._pool = ThreadPoolExecutor(threads, "sglang_lite-weights")
        self._headers: dict[Path, Mapping[str, StoredTensor]] = {}
        super().__init__(folder, files, matrices)

    def read_names_in(self, file: Path) -> list[str]:
        """Reads a file's header, and returns the names of its tensors."""
        found = read_header(self._ranges, file)
        self._headers[file] = {self._renamed(name): header for name, header in found.items()}
        return list(self._headers[file])

    def _read_names(self, file: Path) -> list[str]:
        return self.read_names_in(file)

    def _header(self, name: str, file: Path) -> tuple[StoredTensor, torch.dtype]:
        """Returns the header and dtype of a tensor, by its name in a file."""
        found = self._headers[file][name]
        dtype = DTYPES.get(found.format)
        if dtype is None:
            raise ModelError(
                f"{file}: {name} is stored as {found.format}, which is not supported.",
                hint="Use the unquantised checkpoint, or a GGUF file.",
            )
        if math.prod(found.shape) * dtype.itemsize != found.end - found.start:
            raise ModelError(
                f"{file}: {name} has another size than its shape.", hint="Fetch the file again."
            )
        return found, dtype

    def _read_tensor(self, name: str, file: Path) -> torch.Tensor:
        found, dtype = self._header(self._stored_as[name], file)
        return self.read_tensor(file, found.start, found.shape, dtype)

    def _read_plain(self, name: str, file: Path) -> Weight:
        stored = self._stored_as[name]
        if len(self._headers[file][stored].shape) != 2:
            return self._read_tensor(name, file)
        rows = self.open_matrix(stored, file)
        return (
            self._with_scales(name, rows.shape, rows.read_stored_rows, file)
            if rows.dtype == torch.float8_e4m3fn
            else rows
        )

    def open_matrix(self, name: str, file: Path) -> PlainRows:
        """Returns a matrix of a file by the name that `read_names_in` gives it. Its numbers are
        read when needed.
        """
        found, dtype = self._header(name, file)
        return _RangeRows(
            self, file, found.start, found.shape, dtype, found.shape[1] * dtype.itemsize
        )

    def read_tensor(
        self,
        file: Path,
        start: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: int | None = None,
    ) -> torch.Tensor:
        """Reads a tensor whose numbers begin at `start` in a file, with rows contiguous or `stride`
        bytes apart. Raises ModelError if they can't be read.
        """
        out = torch.empty(tuple(shape), dtype=dtype, pin_memory=self._pinned)
        data: Bytes = (
            out.view(-1).view(torch.uint8).numpy() if out.numel() else np.empty(0, np.uint8)
        )
        piece = max(_PIECE, -(-len(data) // self._threads))
        if stride is None or stride == len(data) // max(shape[0], 1):
            parts = [
                self._pool.submit(
                    self._ranges.read_bytes_into, file, start + at, data[at : at + piece].data
                )
                for at in range(0, len(data), piece)
            ]
        else:
            rows = data.reshape(shape[0], -1)
            step = max(piece // rows.shape[1], 1)
            parts = [
                self._pool.submit(
                    self._ranges.read_rows, file, start + at * stride, stride, rows[at : at + step]
                )
                for at in range(0, len(rows), step)
            ]
        try:
            for part in parts:
                part.result()
        except OSError as error:
            raise ModelError(
                f"{file}: can't be read: {error}", hint="Fetch the file again."
            ) from error
        return out


class _RangeRows(PlainRows):
    """Matrix in a file. Any part of its rows and columns can be read separately.

    Args:
        source: source that reads the file.
        file, start: place of the first number.
        shape, dtype: as for PlainRows.
        stride: bytes between the beginnings of two rows.
    """

    def __init__(
        self,
        source: RangeSource,
        file: Path,
        start: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        stride: int,
    ) -> None:
        super().__init__(shape, dtype)
        self._source = source
        self._file = file
        self._start = start
        self._stride = stride

    def read_stored_rows(self, start: int, end: int) -> torch.Tensor:
        rows, columns = self.shape
        start = min(start, rows)
        end = min(end, rows)
        at = self._start + start * self._stride
        return self._source.read_tensor(
            self._file, at, (end - start, columns), self.dtype, self._stride
        )

    def slice_part(self, rows: slice, columns: slice = slice(None)) -> PlainRows:
        down = range(self.shape[0])[rows]
        across = range(self.shape[1])[columns]
        start = self._start + down.start * self._stride + across.start * self.dtype.itemsize
        return _RangeRows(
            self._source, self._file, start, (len(down), len(across)), self.dtype, self._stride
        )
