"""Packings of quantised matrices: the tensors that make one up, and their meaning.

Each tool's packing has a file beside this one. A source lists a packed matrix under the name that
the matrix would have if it were not packed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from sglang_lite.runtime.models.weights.blocks import Blocks
from sglang_lite.runtime.models.weights.source import EncodedMatrix, EncodedStack

Parts: TypeAlias = Mapping[str, torch.Tensor]  # tensors of a matrix by their suffix, as stored


@dataclass(frozen=True, slots=True)
class Packing:
    """Layout of a tool's quantised matrices.

    Attributes:
        parts: suffixes of the tensors that a matrix has, after the name of its module; a module
            with the first has this packing.
        read: builds the matrix from its tensors. Raises ValueError if they fit neither each other
            nor the declaration.
        optional: suffixes of tensors that it may have.
        ignored: suffixes of tensors that it may have and that are not used: scales of activations.
        weight: suffix of the name under which the model asks for the matrix.
        cpu_bits: bits of a number in memory, scales included, if a CPU multiplies it without
            decoding; None if it is decoded.
        gpu_bits: the same on a GPU that computes in 16 bits, for matrices that it can stack.
    """

    parts: tuple[str, ...]
    read: Callable[[Parts], EncodedMatrix | EncodedStack]
    cpu_bits: float | None
    optional: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    weight: str = ".weight"
    gpu_bits: float | None = None


def count_bits_with_scales(group: int | None) -> float:
    """Returns the number of bits that a 4-bit number takes, including its share of the group's
    16-bit scale and zero. Groups of 128 are assumed if `group` is -1 or None.
    """
    return 4 + 32 / (group if group is not None and group > 0 else 128)


@dataclass(frozen=True, slots=True)
class Packed:
    """Packed matrix in a checkpoint.

    Attributes:
        packing: how it is stored.
        module: name before the suffixes.
        parts: suffixes of the tensors that it has.
        ignored: names of its tensors that are not used.
    """

    packing: Packing
    module: str
    parts: tuple[str, ...]
    ignored: tuple[str, ...] = ()


def match_packings(names: Collection[str], packings: Sequence[Packing]) -> dict[str, Packed]:
    """Returns the packed matrices among a checkpoint's tensors. The keys are the names under which
    a model asks for the matrices.

    Args:
        names: canonical names of the tensors.
        packings: packings that may occur; earlier ones take precedence.

    Raises:
        ValueError: a tensor of a matrix is missing.
    """
    found: dict[str, Packed] = {}
    for packing in packings:
        mark = packing.parts[0]
        for name in names:
            module = name.removesuffix(mark)
            if module == name or (weight := module + packing.weight) in found:
                continue
            if missing := [part for part in packing.parts if module + part not in names]:
                raise ValueError(f"{name} is there, but {module}{missing[0]} is missing")
            there = (*packing.parts, *(part for part in packing.optional if module + part in names))
            ignored = tuple(module + part for part in packing.ignored if module + part in names)
            found[weight] = Packed(packing, module, there, ignored)
    return found


def unpack_integers(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Unpacks int32 words [rows, N] into the unsigned integers [rows, columns] stored in them one
    after the other, lowest bits first.

    Raises:
        ValueError: the words have another dtype or number.
    """
    if words.dtype != torch.int32 or words.shape[-1] != -(-columns * bits // 32):
        wanted = -(-columns * bits // 32)
        raise ValueError(
            f"{wanted} words of int32 hold {columns} numbers of {bits} bits, not {_describe_tensor(words)}"
        )
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        numbers = words.contiguous().view(torch.uint8).unsqueeze(-1) >> shifts & (1 << bits) - 1
        return numbers.flatten(-2)[..., :columns]
    starts = torch.arange(columns) * bits
    wide = torch.nn.functional.pad(words, (0, 1)).long() & 0xFFFFFFFF  # with the next word
    pairs = wide[..., starts // 32] | wide[..., starts // 32 + 1] << 32
    return (pairs >> starts % 32 & (1 << bits) - 1).to(torch.uint8)


def build_scaled_blocks(
    numbers: torch.Tensor,
    bits: int,
    scale: torch.Tensor,
    zero: torch.Tensor | int,
    order: torch.Tensor | None = None,
) -> Blocks:
    """Returns the matrix scale * (number - zero).

    Args:
        numbers: uint8 [rows, columns] in 0 … 2**bits - 1.
        bits: bits of a number, up to 8.
        scale: [rows, blocks].
        zero: [rows, blocks], or one number for all.
        order: as for Blocks.

    Raises:
        ValueError: a scale is zero, infinite or not a number.
    """
    check_scales(scale)
    scale = scale.float()
    if bits <= 4:
        return Blocks(numbers, scale, -zero * scale, order=order)
    signed = (numbers.to(torch.int16) - 128).to(torch.int8)
    symmetric = bool((zero == 128) if isinstance(zero, int) else (zero == 128).all())
    return Blocks(signed, scale, None if symmetric else (128 - zero) * scale, order=order)


def check_scales(scale: torch.Tensor, *, zero: bool = False) -> None:
    """Checks that scales are floats and finite, and also nonzero unless `zero` is True. Raises
    ValueError if not.
    """
    if not scale.is_floating_point():
        raise ValueError(f"scales are {scale.dtype}, no floating-point numbers")
    values = scale.float()
    if not values.isfinite().all() or not (zero or values.all()):
        raise ValueError("a scale is zero, infinite or not a number")


def require_single_scale(scale: torch.Tensor) -> torch.Tensor:
    """Returns the scale of a matrix's scales, as float32 []. Raises ValueError unless there is
    exactly one.
    """
    if scale.numel() != 1:
        raise ValueError(f"the scale of its scales has shape {tuple(scale.shape)}")
    check_scales(scale)
    return scale.float().reshape(())


def columns_per_block(columns: int, scales: int, group: int | None) -> int:
    """Returns the number of columns in a block.

    Args:
        columns: columns of the matrix.
        scales: scales of a row.
        group: declared columns of a block; -1 for all, None if not declared.

    Raises:
        ValueError: the blocks don't divide the columns, or are not those declared.
    """
    wanted = columns if group in (-1, 0) else group
    if wanted is not None and columns % wanted:
        dividing = [size for size in (16, 32, 64, 128, 256) if columns % size == 0]
        raise ValueError(f"groups of {wanted} don't divide {columns} inputs; {dividing} would")
    if not scales or columns % scales or (wanted is not None and columns // scales != wanted):
        declared = (
            "" if wanted is None else f", and quantization_config declares groups of {wanted}"
        )
        raise ValueError(f"{scales} scales for a row of {columns} inputs{declared}")
    return columns // scales


def _describe_tensor(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)}"
