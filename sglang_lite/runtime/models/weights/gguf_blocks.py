"""Readers of GGUF's quantised blocks. They return integers and scales, with which a CPU can
multiply without decoding the numbers.

The formats are ggml's (https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h). A reader
takes uint8 [rows, bytes of a row] of whole blocks. Docstrings list the parts of a block in order,
then a value's formula; d and m are float16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_lite.runtime.models.weights.blocks import Blocks, Format
from sglang_lite.runtime.models.weights.source import EncodedMatrix


def _float16_from_bytes(data: torch.Tensor) -> torch.Tensor:
    """Returns float32 [..., N] from float16 stored as bytes [..., 2 N]."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Returns the low halves of bytes [..., N], then the high halves: [..., 2 N]. N must be a
    multiple of 8.
    """
    words = data.contiguous().view(torch.int64)
    low = 0x0F0F0F0F0F0F0F0F
    return torch.stack((words & low, words >> 4 & low), -2).view(torch.uint8).flatten(-2)


def _q4_0(data: torch.Tensor) -> Blocks:
    """Reads Q4_0 blocks: d, 16 bytes of nibbles; a value is d * (q - 8)."""
    blocks = data.view(len(data), -1, 18)
    scale = _float16_from_bytes(blocks[:, :, :2]).squeeze(-1)
    return Blocks(_nibbles(blocks[:, :, 2:]).flatten(1), scale, -8 * scale)


def _q4_1(data: torch.Tensor) -> Blocks:
    """Reads Q4_1 blocks: d, m, 16 bytes of nibbles; a value is d * q + m."""
    blocks = data.view(len(data), -1, 20)
    scale, minimum = _float16_from_bytes(blocks[:, :, :4]).unbind(-1)
    return Blocks(_nibbles(blocks[:, :, 4:]).flatten(1), scale.contiguous(), minimum.contiguous())


def _with_fifth_bits(high: torch.Tensor, nibbles: torch.Tensor) -> torch.Tensor:
    """Adds a fifth bit to 32 nibbles: bit i of the 4 bytes `high` goes to nibble i. Returns int8
    [..., 32] in 0 … 31.
    """
    bits = (high.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return (_nibbles(nibbles) | bits.flatten(-2) << 4).to(torch.int8)


def _q5_0(data: torch.Tensor) -> Blocks:
    """Reads Q5_0 blocks: d, 4 bytes of high bits, 16 bytes of nibbles; a value is d * (q - 16)."""
    blocks = data.view(len(data), -1, 22)
    q = _with_fifth_bits(blocks[:, :, 2:6], blocks[:, :, 6:]) - 16
    return Blocks(q.flatten(1), _float16_from_bytes(blocks[:, :, :2]).squeeze(-1))


def _q5_1(data: torch.Tensor) -> Blocks:
    """Reads Q5_1 blocks: d, m, 4 bytes of high bits, 16 bytes of nibbles; a value is d * q + m."""
    blocks = data.view(len(data), -1, 24)
    scale, minimum = _float16_from_bytes(blocks[:, :, :4]).unbind(-1)
    q = _with_fifth_bits(blocks[:, :, 4:8], blocks[:, :, 8:])
    return Blocks(q.flatten(1), scale.contiguous(), minimum.contiguous())


def _q8_0(data: torch.Tensor) -> Blocks:
    """Reads Q8_0 blocks: d, 32 signed bytes; a value is d * q."""
    blocks = data.view(len(data), -1, 34)
    return Blocks(
        blocks[:, :, 2:].flatten(1).view(torch.int8),
        _float16_from_bytes(blocks[:, :, :2]).squeeze(-1),
    )


def _k_scales(head: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scales and minima, float32 [rows, blocks of 32], from the first 16 bytes of K formats
    [rows, blocks, 16].

    The bytes hold d of the scales, d of the minima, and eight of each in 6 bits.
    """
    d = _float16_from_bytes(head[:, :, :4])
    low = head[:, :, 4:8]
    middle = head[:, :, 8:12]
    mixed = head[:, :, 12:]
    scale = torch.cat((low & 63, mixed & 15 | low >> 2 & 48), -1)
    minimum = torch.cat((middle & 63, mixed >> 4 | middle >> 2 & 48), -1)
    return (d[:, :, :1] * scale).flatten(1), (-d[:, :, 1:] * minimum).flatten(1)


def _q4_k(data: torch.Tensor) -> Blocks:
    """Reads Q4_K blocks: scales as in `_k_scales`, then 32 bytes of nibbles for every two blocks of
    32.
    """
    blocks = data.view(len(data), -1, 144)
    q = _nibbles(blocks[:, :, 16:].reshape(len(data), -1, 4, 32))
    return Blocks(q.flatten(1), *_k_scales(blocks[:, :, :16]))


def _q5_k(data: torch.Tensor) -> Blocks:
    """Reads Q5_K blocks: scales as in `_k_scales`, 32 bytes whose bit i belongs to block i, then
    nibbles as in Q4_K.
    """
    blocks = data.view(len(data), -1, 176)
    high = (blocks[:, :, 16:48].unsqueeze(2) >> torch.arange(8, dtype=torch.uint8).view(8, 1)) & 1
    low = _nibbles(blocks[:, :, 48:].reshape(len(data), -1, 4, 32)).view(len(data), -1, 8, 32)
    return Blocks((low | high << 4).to(torch.int8).flatten(1), *_k_scales(blocks[:, :, :16]))


def _q6_k(data: torch.Tensor) -> Blocks:
    """Reads Q6_K blocks: twice 64 bytes of nibbles; twice 32 bytes with the upper two bits of four
    blocks of 32; 16 signed scales, one per 16 values; d. A value is d * scale * (q - 32).
    """
    blocks = data.view(len(data), -1, 210)
    low = _nibbles(blocks[:, :, :128].reshape(len(data), -1, 2, 64)).view(len(data), -1, 2, 4, 32)
    high = blocks[:, :, 128:192].reshape(len(data), -1, 2, 1, 32)
    high = high >> torch.arange(0, 8, 2, dtype=torch.uint8).view(4, 1) & 3
    scale = _float16_from_bytes(blocks[:, :, 208:]) * blocks[:, :, 192:208].contiguous().view(
        torch.int8
    )
    return Blocks(((low | high << 4).to(torch.int8) - 32).flatten(1), scale.flatten(1))


READERS: dict[str, Callable[[torch.Tensor], Blocks]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_FORMATS = {
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K"), Format(4, 32, minimum=True)),
    **dict.fromkeys(("Q5_0", "Q8_0"), Format(8, 32, minimum=False)),
    **dict.fromkeys(("Q5_1", "Q5_K"), Format(8, 32, minimum=True)),
    "Q6_K": Format(8, 16, minimum=False),
}
IN_FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")  # types that a GPU can keep in 4 bits
# Bits per weight in a CPU's memory: 4 or 8, plus its share of a scale and of a minimum.
BITS = {
    "Q4_0": 5.0,
    "Q4_1": 5.0,
    "Q4_K": 5.0,
    "Q5_0": 8.5,
    "Q8_0": 8.5,
    "Q5_1": 9.0,
    "Q5_K": 9.0,
    "Q6_K": 9.0,
}


class GgufBlocks(Blocks):
    """Matrix kept in the blocks of a GGUF file. Its integers and scales are read on first use.

    Args:
        data: uint8 [rows, bytes of a row], contiguous; may be mapped from the file.
        kind: type of the blocks, a key of `READERS`.
        columns: numbers of a row.
    """

    def __init__(self, data: torch.Tensor, kind: str, columns: int) -> None:
        EncodedMatrix.__init__(self, (len(data), columns))
        self.data = data
        self.kind = kind
        self.table = None
        self.order = None

    def __getattr__(self, name: str) -> Any:  # a tensor or None
        if name not in ("q", "scale", "minimum"):
            raise AttributeError(name)
        read = READERS[self.kind](self.data)
        self.q = read.q
        self.scale = read.scale
        self.minimum = read.minimum
        return getattr(self, name)

    @property
    def format(self) -> Format:
        return _FORMATS[self.kind]

    def __getitem__(self, rows: slice | torch.Tensor) -> torch.Tensor:
        return READERS[self.kind](self.data[rows])[:]

    def slice_part(self, rows: slice, columns: slice = slice(None)) -> Blocks:
        if columns.indices(self.shape[1]) == (0, self.shape[1], 1):
            return GgufBlocks(self.data[rows], self.kind, self.shape[1])
        return super().slice_part(rows, columns)
