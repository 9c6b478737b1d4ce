"""Packs matrices of GGUF files for `BlockProduct` directly from the file's bytes. Compiled from
`gguf_packing.cpp`.

The reference decodes the file with `weights/gguf_blocks.py` and packs the result with
`block_product.pack_blocks`. It yields the same bits, but takes 10 to 25 times as long.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch

from sglang_lite.runtime.kernels.block_product import BLOCK, KIND_BYTES, PackedBlocks

SOURCE = Path(__file__).with_suffix(".cpp")
_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_LONG = ctypes.c_int64

# Kind of packed blocks by GGUF type.
PACKED_KINDS = {
    "Q4_0": "4",
    "Q4_1": "4",
    "Q4_K": "4",
    "Q5_0": "8",
    "Q8_0": "8",
    "Q5_1": "8_minimum",
    "Q5_K": "8_minimum",
    "Q6_K": "8_halves",
}


def pack_gguf(
    library: ctypes.CDLL, matrices: Sequence[tuple[str, torch.Tensor]], inputs: int
) -> PackedBlocks:
    """Packs matrices into one, stacked along their outputs. Their GGUF types must share one kind of
    packed blocks.

    Args:
        library: compiled `gguf_packing.cpp`.
        matrices: the type of each, a key of `PACKED_KINDS`, and uint8 [outputs, bytes of a row],
            contiguous; outputs are multiples of 16.
        inputs: columns of each.
    """
    (kind,) = {PACKED_KINDS[gguf_type] for gguf_type, _ in matrices}
    packed = PackedBlocks.allocate_packed(kind, sum(len(data) for _, data in matrices), inputs)
    at = packed.data.data_ptr()
    for gguf_type, data in matrices:
        run = library[f"pack_{gguf_type}"]
        run.argtypes = [_POINTER, _LONG, _LONG, _POINTER, _INT]
        run(data.data_ptr(), len(data), inputs, at, torch.get_num_threads())
        at += len(data) * inputs // BLOCK * KIND_BYTES[kind]
    return packed
