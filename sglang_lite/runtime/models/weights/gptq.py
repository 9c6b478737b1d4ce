"""GPTQ's packing (arXiv:2210.17323), as AutoGPTQ and GPTQModel write it: 2, 3, 4 or 8 bits.

`qweight` int32 [inputs * bits / 32, outputs] and `qzeros` int32 [groups, outputs * bits / 32] pack
numbers consecutively along their first and second axis; `scales` [groups, outputs]; `g_idx` int32
[inputs], the group of each input. value = scale * (number - zero), where the first version of the
format stores zero - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

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

BITS = (2, 3, 4, 8)
# bits of a number, and inputs of a group; -1 for all, None if not declared
Scheme: TypeAlias = tuple[int, int | None]


def gptq(schemes: Sequence[Scheme], *, second_version: bool) -> Packing:
    """Returns GPTQ's packing.

    Args:
        schemes: schemes of all matrices, the most common one first.
        second_version: whether zeros are stored as they are, not minus 1.
    """
    read = partial(_read, schemes=schemes, offset=0 if second_version else 1)
    few = all(bits <= 4 for bits, _ in schemes)
    return Packing(
        (".qweight", ".qzeros", ".scales"),
        read,
        5.0 if few else 9.0,
        optional=(".g_idx",),
        gpu_bits=max(count_bits_with_scales(group) for _, group in schemes) if few else None,
    )


def _read(parts: Parts, *, schemes: Sequence[Scheme], offset: int) -> Blocks:
    scales = parts[".scales"]
    words = parts[".qweight"]
    groups, outputs = scales.shape
    bits, group = next((each for each in schemes if _fits_scheme(parts, *each)), schemes[0])
    inputs = words.shape[0] * 32 // bits
    columns_per_block(inputs, groups, group)
    numbers = unpack_integers(words.t(), bits, inputs)
    zeros = unpack_integers(parts[".qzeros"], bits, outputs)
    if len(numbers) != outputs or zeros.shape != scales.shape:
        raise ValueError(
            f"qweight, qzeros and scales are of {len(numbers)}, {zeros.shape[1]} and {outputs} outputs"
        )
    order = inputs_sorted_by_group(parts[".g_idx"], inputs, groups) if ".g_idx" in parts else None
    zero = zeros.t().to(torch.int16) + offset
    return build_scaled_blocks(
        numbers if order is None else numbers[:, order], bits, scales.t(), zero, order
    )


def _fits_scheme(parts: Parts, bits: int, group: int | None) -> bool:
    """Returns whether the tensors of a matrix have the shapes of a scheme."""
    groups, outputs = parts[".scales"].shape
    inputs = parts[".qweight"].shape[0] * 32 // bits
    alike = group is None or groups == (1 if group == -1 else inputs // group)
    return alike and parts[".qzeros"].shape[-1] == -(-outputs * bits // 32)


def inputs_sorted_by_group(index: torch.Tensor, inputs: int, groups: int) -> torch.Tensor | None:
    """Returns the indices of the inputs, sorted by their group, or None if they already are. Raises
    ValueError if the groups differ in size.
    """
    if index.dtype not in (torch.int32, torch.int64) or index.shape != (inputs,):
        raise ValueError(
            f"g_idx is {index.dtype} of shape {tuple(index.shape)}, not a group for each of {inputs} inputs"
        )
    sorted_groups, order = index.long().sort(stable=True)
    if not torch.equal(sorted_groups, torch.arange(inputs) // (inputs // groups)):
        raise ValueError(
            f"g_idx does not put {inputs // groups} inputs into each of {groups} groups"
        )
    return None if torch.equal(order, torch.arange(inputs)) else order
