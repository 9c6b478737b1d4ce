"""Multiplies a single row by matrices of 4-bit numbers. Reading the weights takes most of the time.

As in gemv.py, the neighbouring operations are fused in, and the first weights are loaded before the
preceding kernels have finished. A program keeps its inputs in registers and iterates over tiles of
outputs. A single mask turns a 4-bit number into a float that is too small by a constant factor, for
which the inputs are scaled up (3.55 instructions per weight in total). The zero of a group, times
the sum of its inputs, is subtracted from the group's sum.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.activation import apply_activation
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.packed_products import (
    count_column_blocks,
    scales_of,
    weight_kernel_constants,
    zeros_of,
)
from sglang_lite.runtime.kernels.packed_weight import SLICES, PackedWeight
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

_OUTPUTS = 8  # of a program at once
_WARPS = 16  # of a multiprocessor


@triton.constexpr_function
def _shift(j: int, half: int) -> int:
    """Returns how many bits to shift a word so that the numbers of slice j in this half end below
    bit 24.
    """
    return 8 if half and j > 1 else 0


@triton.constexpr_function
def _input_factor(kind: str, j: int, half: int) -> float:
    """Returns the factor for the inputs. Times 2**64, it compensates for the scaling in `_floats`."""
    return 2.0 ** (85 - (4 * j + 16 * half - _shift(j, half))) if kind == "integers" else 2.0**62


@triton.jit
def _floats(words, J: tl.constexpr, HALF: tl.constexpr, KIND: tl.constexpr):
    """Unpacks the numbers of slice J that are in half HALF of words, as float32. They are divided
    by `_input_factor` and 2**64.
    """
    AT: tl.constexpr = 4 * J + 16 * HALF
    # the bits of an integer below 2**24 are those of a float, of 2**-149 of it
    if KIND == "integers":
        bits = words >> _shift(J, HALF) & (15 << AT - _shift(J, HALF))
    else:
        moved = words << 22 - AT if AT < 22 else words >> AT - 22
        bits = moved & (7 << 22) | words << 28 - AT & -(1 << 31)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _inputs(
    x,
    residual,
    norm,
    residual_out,
    at,
    K,
    J: tl.constexpr,
    KIND: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
):
    """Loads the inputs of slice J. Returns those for the lower halves of words [Q, 4] and for the
    upper halves [Q, 4], both multiplied by `_input_factor`; their sums [Q] / 2**64; and the sums of
    their squares before the norm.
    """
    k = at[:, None] + tl.arange(0, 8)[None, :]
    value = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
    if ADD:  # rounded to the data type of the residual stream first, as in add_norm
        value += tl.load(residual + k, mask=k < K, other=0.0).to(tl.float32)
        rounded = value.to(x.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(residual_out + k, rounded, mask=k < K)
        value = rounded.to(tl.float32)
    squares = tl.sum(value * value, 1)
    if NORM:
        value *= tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
    low, high = tl.split(tl.reshape(value, (at.shape[0], 4, 2)))
    return (
        low * _input_factor(KIND, J, 0),
        high * _input_factor(KIND, J, 1),
        tl.sum(value, 1) * 2.0**-64,
        squares,
    )


@triton.jit
def row_inputs(
    x,
    residual,
    norm,
    residual_out,
    quad,
    K,
    SLICE: tl.constexpr,
    KIND: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
):
    """Returns the `_inputs` of the four slices, for quads [Q] of a row's words."""
    at = quad // (SLICE // 8) * 4 * SLICE + quad % (SLICE // 8) * 8
    return (
        _inputs(x, residual, norm, residual_out, at, K, 0, KIND, ADD, NORM),
        _inputs(x, residual, norm, residual_out, at + SLICE, K, 1, KIND, ADD, NORM),
        _inputs(x, residual, norm, residual_out, at + 2 * SLICE, K, 2, KIND, ADD, NORM),
        _inputs(x, residual, norm, residual_out, at + 3 * SLICE, K, 3, KIND, ADD, NORM),
    )


@triton.jit
def row_sums(
    packed,
    scales,
    quad,
    mask,
    n,
    stride,
    inputs,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    HALF: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Multiplies rows n [N] of a matrix by a row of inputs. Returns the products / 2**64 for each
    quad of four words, [N, Q].

    Args:
        packed: words [N, 4 Q].
        scales: pointers, one or [Q, 1], to the scale of row 0 and group 0.
        quad: quads [Q] of a row's words.
        mask: whether there is such a quad and row [Q, N].
        stride: scales of a group.
        inputs: `row_inputs` of the quads.
    """
    block = quad // (SLICE // 8)
    numbers = tl.reshape(packed, (n.shape[0], quad.shape[0], 4))
    acc = tl.zeros((n.shape[0], quad.shape[0]), tl.float32)
    for start in tl.static_range(0, 4, TOGETHER):  # slices of a group
        of_group = ((block * 4 + start) * SLICE // GROUP * stride)[:, None] + n[None, :]
        scale = tl.trans(tl.load(scales + of_group, mask=mask, other=0))
        products = tl.zeros((n.shape[0], quad.shape[0], 4), tl.float32)
        total = tl.zeros((quad.shape[0],), tl.float32)
        for j in tl.static_range(start, start + TOGETHER):
            low, high, plain, _ = inputs[j]
            total += plain
            products += _floats(numbers, j, 0, KIND) * low[None, :, :]
            products += _floats(numbers, j, 1, KIND) * high[None, :, :]
        sums = tl.sum(products, 2)
        if KIND == "integers":
            zero = ZERO
            if ZERO < 0:
                zero = zeros_of(scale)
            sums -= zero * total[None, :]
        acc += sums * scales_of(scale, ZERO, HALF)
    return acc


@cached_launch
@triton.jit
def _packed_row(
    x,
    residual,
    norm,
    words,
    scales,
    bias,
    y,
    residual_out,
    N,
    K,
    eps,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    HALF: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCKS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUADS: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    OUTPUTS: tl.constexpr = BLOCK_N if GATE == "" else BLOCK_N // 2
    WORDS: tl.constexpr = BLOCKS * (SLICE // 2)  # of a row
    quad, word, row = tl.arange(0, QUADS), tl.arange(0, QUADS * 4), tl.arange(0, BLOCK_N)
    FULL: tl.constexpr = WORDS == QUADS * 4
    valid, inside = FULL | (word < WORDS), FULL | (quad < WORDS // 4)
    output = row % OUTPUTS
    stride = N if GATE == "" else 2 * N
    n = output + row // OUTPUTS * N  # of the first program; with a gate gates, then as many ups
    first = tl.program_id(0) * OUTPUTS
    place = words + first.to(tl.int64) * WORDS + n.to(tl.int64)[:, None] * WORDS + word[None, :]
    last = output * 0 if EVEN else output  # by which a tile may be too long
    packed = tl.load(
        place,
        mask=valid[None, :] & (first + last < N)[:, None],
        other=0,
        eviction_policy="evict_first",
    )
    start_next(PDL)
    wait(PDL)
    inputs = row_inputs(x, residual, norm, residual_out, quad, K, SLICE, KIND, ADD, NORM)
    factor = 2.0**64
    if NORM:
        factor *= tl.rsqrt(
            tl.sum(inputs[0][3] + inputs[1][3] + inputs[2][3] + inputs[3][3]) / K + eps
        )
    for tile in range(tl.program_id(0), tl.cdiv(N, OUTPUTS), tl.num_programs(0)):
        of_tile = packed
        first = tile * OUTPUTS
        stored = first + last < N
        later = first + tl.num_programs(0) * OUTPUTS
        place = words + later.to(tl.int64) * WORDS + n.to(tl.int64)[:, None] * WORDS + word[None, :]
        packed = tl.load(
            place,
            mask=valid[None, :] & (later + last < N)[:, None],
            other=0,
            eviction_policy="evict_first",
        )
        acc = row_sums(
            of_tile,
            scales + first,
            quad,
            inside[:, None] & stored[None, :],
            n,
            stride,
            inputs,
            KIND,
            ZERO,
            HALF,
            SLICE,
            GROUP,
            TOGETHER,
        )
        result = tl.sum(acc, 1) * factor
        if BIAS:
            result += tl.load(bias + first + n, mask=stored, other=0.0).to(tl.float32)
        if GATE != "":
            gate, up = tl.split(tl.permute(tl.reshape(result, (2, OUTPUTS)), (1, 0)))
            result = apply_activation(gate, GATE) * up
        to = first + tl.arange(0, OUTPUTS)
        tl.store(y + to, result.to(y.dtype.element_ty), mask=to < N)


def packed_row(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    *,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gate: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes `linear_single_row` (gemv.py) with a packed matrix that has no table. Takes the same
    arguments.
    """
    assert weight.table is None
    rows, inputs = weight.shape
    quads = count_word_quads(weight)
    warps = min(_WARPS, quads // 32)
    # as many as a thread has registers for
    together = max(2, _OUTPUTS * _WARPS * 32 // max(quads, _WARPS * 32))
    outputs, tile = (rows // 2, together // 2) if gate else (rows, together)
    y = x.new_empty((1, outputs))
    total = x if residual is None else x.new_empty(x.shape)
    programs = _WARPS // warps * properties_of(x.device).multiprocessors
    _packed_row[(min(cdiv(outputs, tile), programs),)](
        x,
        residual,
        norm,
        weight.words,
        weight.scales,
        bias,
        y,
        total,
        outputs,
        inputs,
        eps,
        **weight_kernel_constants(weight),
        TOGETHER=math.gcd(weight.group // weight.slice, SLICES),
        BLOCKS=count_column_blocks(weight),
        ADD=residual is not None,
        NORM=norm is not None,
        BIAS=bias is not None,
        GATE=gate,
        BLOCK_N=together,
        QUADS=quads,
        EVEN=outputs % tile == 0,
        num_warps=warps,
        **pdl_options(x.device),
    )
    return y, total


def count_word_quads(weight: PackedWeight) -> int:
    """Returns the number of groups of four words in a row of the matrix, rounded up to a power of
    two, but at least 32.
    """
    return max(32, round_up_to_power_of_2(weight.words.shape[1] // 4))
