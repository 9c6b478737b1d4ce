"""Header of a GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): metadata and
locations of tensors.

Needs no torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np

from sglang_lite.protocol import ModelError
from sglang_lite.protocol.anything import Foreign
from sglang_lite.runtime.models.config_fields import abbreviate

if TYPE_CHECKING:
    from gguf.constants import GGMLQuantizationType

SUPPORTED_TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL",
    "IQ4_XS", "MXFP4",
)  # fmt: skip


class GgufFile:
    """Opened GGUF file: its metadata, and its tensors, each read through its own memory map.

    (gguf's own reader takes two seconds to index a 49k vocabulary; this one takes 0.1 and checks
    every bound.)

    Args:
        path: file to open.

    Raises:
        ModelError: the file is not GGUF, is truncated, or has a quantisation that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if not path.is_file():  # opening a pipe would block for ever
                raise ModelError(
                    f"{path}: not a regular file.", hint="Replace it by the file itself."
                )
            content = np.memmap(path, mode="r")
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{path}: can't be read: {error}", hint="Fetch the file again."
            ) from error
        header = _Header(content.data, path)
        self.metadata = header.metadata
        self.tensors = {tensor.name: tensor for tensor in header.tensors}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Location of a tensor in a file.

    Attributes:
        path: file that holds the tensor.
        name: name of the tensor in the file.
        shape: shape in PyTorch's order.
        kind: type of the numbers, such as "Q4_1".
        offset, size: place in the file, in bytes.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    size: int

    def matrix_of_stack(self, index: int) -> GgufTensor:
        """Returns matrix `index` of a stack."""
        size = self.size // self.shape[0]
        return replace(self, shape=self.shape[1:], offset=self.offset + index * size, size=size)

    def data(self) -> np.ndarray[Foreign, Foreign]:
        """Returns the bytes of the tensor as stored: uint8 [rows, bytes per row], with one row for
        a vector.
        """
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return np.memmap(self.path, np.uint8, "c", self.offset, (rows, self.size // rows))


class _Header:
    """Parser of a file's header. Every read is checked against the end of the file."""

    _SCALARS: ClassVar = {
        0: "<B",
        1: "<b",
        2: "<H",
        3: "<h",
        4: "<I",
        5: "<i",
        6: "<f",
        7: "<?",
        10: "<Q",
        11: "<q",
        12: "<d",
    }
    _STRING = 8
    _ARRAY = 9

    def __init__(self, data: memoryview, path: Path) -> None:
        self.bytes = data
        self.path = path
        self.at = 0
        if bytes(data[:4]) != b"GGUF":
            raise ModelError(
                f"{path}: not a GGUF file (it starts with {bytes(data[:4])!r}).",
                hint="Fetch the file again.",
            )
        self.at = 4
        version = self.scalar("<I")
        if version not in (2, 3):
            raise ModelError(
                f"{path}: GGUF version {version} is not supported.", hint="Supported: 2 and 3."
            )
        tensor_count = self.scalar("<Q")
        key_count = self.scalar("<Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.string()
            if key in self.metadata:
                raise ModelError(
                    f"{path}: damaged: the key {abbreviate(key)} is there twice.",
                    hint="Fetch the file again.",
                )
            self.metadata[key] = self.value(self.scalar("<I"))
        found = [self.tensor_info() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise ModelError(
                f"{path}: `general.alignment`: {abbreviate(alignment)} is not between 1 and 1,048,576.",
                hint="Fetch the file again.",
            )
        start = -(-self.at // alignment) * alignment
        self.tensors = [self.tensor(*info, start) for info in found]
        self.check_tensor_order(start, alignment)

    def fail_truncated(self) -> NoReturn:
        raise ModelError(
            f"{self.path}: damaged or truncated (at byte {self.at:,}).",
            hint="Fetch the file again.",
        )

    def fail_unknown(self, what: str) -> NoReturn:
        raise ModelError(
            f"{self.path}: {what} at byte {self.at:,}: the file is damaged, or of a newer GGUF version.",
            hint="Fetch the file again, or use the HF folder.",
        )

    def scalar(self, code: str) -> Any:
        try:
            (value,) = struct.unpack_from(code, self.bytes, self.at)
        except struct.error:
            self.fail_truncated()
        self.at += struct.calcsize(code)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        end = self.at + length
        if end > len(self.bytes):
            self.fail_truncated()
        text = str(self.bytes[self.at : end], "utf-8", "replace")
        self.at = end
        return text

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == self._STRING:
            return self.string()
        if kind == self._ARRAY:
            item = self.scalar("<I")
            count = self.scalar("<Q")
            if depth > 8:
                self.fail_unknown("arrays nested more than 8 deep")
            if count > len(self.bytes):
                self.fail_truncated()
            if item in self._SCALARS:
                return self.numbers(self._SCALARS[item], count)
            if item == self._STRING:
                return self.strings(count)
            return [self.value(item, depth + 1) for _ in range(count)]
        if kind not in self._SCALARS:
            self.fail_unknown(f"metadata type {kind}")
        return self.scalar(self._SCALARS[kind])

    def strings(self, count: int) -> list[str]:
        """Reads the next `count` strings. Faster than reading each with `string`, which matters
        because every start reads a vocabulary of up to 150,000.
        """
        data = self.bytes
        at = self.at
        found = []
        length = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                start = at + 8
                end = start + length(data, at)[0]
                if end > len(data):
                    raise struct.error  # as if the length itself were cut off
                found.append(str(data[start:end], "utf-8", "replace"))
                at = end
        except struct.error:
            self.at = at
            self.fail_truncated()
        self.at = at
        return found

    def numbers(self, code: str, count: int) -> list[Any]:
        size = struct.calcsize(code) * count
        if self.at + size > len(self.bytes):
            self.fail_truncated()
        values = list(struct.unpack_from(f"<{count}{code[1]}", self.bytes, self.at))
        self.at += size
        return values

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dimensions = self.scalar("<I")
        if dimensions > 8:
            self.fail_unknown(f"a tensor of {dimensions:,} dimensions")
        shape = tuple(reversed([self.scalar("<Q") for _ in range(dimensions)]))
        return name, shape, self.scalar("<I"), self.scalar("<Q")

    def tensor(
        self, name: str, shape: tuple[int, ...], type_id: int, offset: int, start: int
    ) -> GgufTensor:
        from gguf.constants import GGML_QUANT_SIZES

        known = _ggml_types()
        kind = known[type_id].name if type_id in known else f"type {type_id}"
        if kind not in SUPPORTED_TYPES:
            raise ModelError(
                f"{self.path}: tensor {name} is stored as {kind}, which is not supported.",
                hint=f"Supported: {', '.join(SUPPORTED_TYPES)}.",
            )
        per_block, block_bytes = GGML_QUANT_SIZES[known[type_id]]
        count = math.prod(shape)
        if not shape or not count or shape[-1] % per_block:
            raise ModelError(
                f"{self.path}: tensor {name} of shape {shape} does not fit {kind} blocks.",
                hint="Fetch the file again.",
            )
        size = count // per_block * block_bytes
        if start + offset + size > len(self.bytes):
            self.at = start + offset
            self.fail_truncated()
        return GgufTensor(self.path, name, shape, kind, start + offset, size)

    def check_tensor_order(self, start: int, alignment: int) -> None:
        """Checks that each tensor occurs once, and that they follow one another from `start`, as
        llama.cpp writes them.
        """
        names = set[str]()
        for tensor in self.tensors:
            if tensor.name in names:
                problem = f"damaged: the tensor {abbreviate(tensor.name)} is there twice"
                raise ModelError(f"{self.path}: {problem}.", hint="Fetch the file again.")
            if tensor.offset != start:
                name = abbreviate(tensor.name)
                problem = (
                    f"damaged: the tensor {name} begins at byte {tensor.offset:,}, not {start:,}"
                )
                raise ModelError(f"{self.path}: {problem}.", hint="Fetch the file again.")
            names.add(tensor.name)
            start += -(-tensor.size // alignment) * alignment


@cache
def _ggml_types() -> Mapping[int, GGMLQuantizationType]:
    from gguf.constants import GGMLQuantizationType

    return {kind.value: kind for kind in GGMLQuantizationType}
