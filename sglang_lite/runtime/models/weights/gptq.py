"""GPTQ's packing (arXiv:2210.17323), as AutoGPTQ and GPTQModel write it: 2, 3, 4 or 8 bits.

`qweight` int32 [inputs * bits / 32, outputs] and `qzeros` int32 [groups, outputs * bits / 32] hold numbers one behind
another along their first and second axis; `scales` [groups, outputs]; `g_idx` int32 [inputs], the group of each input.
value = scale * (number - zero), where the first version of the format stores zero - 1.
"""

from __future__ import annotations

from functools import partial

import torch

from sglang_lite.runtime.models.weights.blocks import Blocks
from sglang_lite.runtime.models.weights.packing import Packing, Parts, blocks_of, four_bits_in, groups_of, unpacked

BITS = (2, 3, 4, 8)


def gptq(bits: int, group: int | None, *, second_version: bool) -> Packing:
    """Packing of GPTQ.

    Args:
        bits: bits of a number.
        group: inputs of a group; -1 for all, None if the checkpoint does not declare it.
        second_version: whether zeros are stored as they are.
    """
    read = partial(_read, bits=bits, group=group, offset=0 if second_version else 1)
    few = bits <= 4
    return Packing(
        (".qweight", ".qzeros", ".scales"), read, 5.0 if few else 9.0, optional=(".g_idx",),
        gpu_bits=four_bits_in(group) if few else None,
    )  # fmt: skip


def _read(parts: Parts, *, bits: int, group: int | None, offset: int) -> Blocks:
    scales, words = parts[".scales"], parts[".qweight"]
    groups, outputs = scales.shape
    inputs = words.shape[0] * 32 // bits
    groups_of(inputs, groups, group)
    numbers = unpacked(words.t(), bits, inputs)
    zeros = unpacked(parts[".qzeros"], bits, outputs)
    if len(numbers) != outputs or zeros.shape != scales.shape:
        raise ValueError(f"qweight, qzeros and scales are of {len(numbers)}, {zeros.shape[1]} and {outputs} outputs")
    order = input_order(parts[".g_idx"], inputs, groups) if ".g_idx" in parts else None
    zero = zeros.t().to(torch.int16) + offset
    return blocks_of(numbers if order is None else numbers[:, order], bits, scales.t(), zero, order)


def input_order(index: torch.Tensor, inputs: int, groups: int) -> torch.Tensor | None:
    """Inputs sorted by their group, or None if they are. Raises ValueError if the groups are not of one size."""
    if index.dtype not in (torch.int32, torch.int64) or index.shape != (inputs,):
        raise ValueError(
            f"g_idx is {index.dtype} of shape {tuple(index.shape)}, not a group for each of {inputs} inputs"
        )
    sorted_groups, order = index.long().sort(stable=True)
    if not torch.equal(sorted_groups, torch.arange(inputs) // (inputs // groups)):
        raise ValueError(f"g_idx does not put {inputs // groups} inputs into each of {groups} groups")
    return None if torch.equal(order, torch.arange(inputs)) else order
