"""AWQ's 4-bit packing for matmuls, "gemm" (arXiv:2306.00978).

`qweight` int32 [inputs, outputs / 8] and `qzeros` int32 [groups, outputs / 8] hold eight outputs
per word, in AWQ's own order; `scales` [groups, outputs]. value = scale * (number - zero).
"""

from __future__ import annotations

from functools import partial

import torch

from sglang_lite.runtime.models.weights.blocks import Blocks
from sglang_lite.runtime.models.weights.packing import (
    Packing,
    Parts,
    build_scaled_blocks,
    columns_per_block,
    count_bits_with_scales,
    unpack_integers,
)

# nibble of a word that holds each of eight outputs
_PLACES = torch.tensor((0, 4, 1, 5, 2, 6, 3, 7))


def awq(group: int | None) -> Packing:
    """Returns AWQ's packing. `group` is the number of inputs in a group; -1 for all, None if not
    declared.
    """
    parts = ".qweight", ".qzeros", ".scales"
    return Packing(parts, partial(_read, group=group), 5.0, gpu_bits=count_bits_with_scales(group))


def _read(parts: Parts, *, group: int | None) -> Blocks:
    scales = parts[".scales"]
    groups, outputs = scales.shape
    numbers, zeros = (_unpack_outputs(parts[name], outputs) for name in (".qweight", ".qzeros"))
    columns_per_block(len(numbers), groups, group)
    if zeros.shape != scales.shape:
        raise ValueError(f"qzeros are of {len(zeros)} groups, and scales of {groups}")
    return build_scaled_blocks(numbers.t(), 4, scales.t(), zeros.t().to(torch.int16))


def _unpack_outputs(words: torch.Tensor, outputs: int) -> torch.Tensor:
    if outputs % 8:
        raise ValueError(f"{outputs} outputs are no multiple of 8")
    return unpack_integers(words, 4, outputs).view(len(words), -1, 8)[:, :, _PLACES].flatten(1)
