"""Multiplies tokens by the 4-bit matrices of their experts, which are decoded in registers.

    hidden[r] = act(gate[e] x[t]) * (up[e] x[t])        e = expert of row r's block, t = its token
    out[j, t] = weights[t, j] * (down[e] hidden[r])     j = index of e among the token's experts

The rows of a block are those of `experts_order`. A block's programs read the expert's matrix once,
N * K / 2 bytes and its scales. The tensor cores use the decoded numbers directly from the registers
(packed_products.py).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.activation import gated_pair
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.experts_order import ExpertBlocks
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.packed_products import (
    SCRATCH,
    count_column_blocks,
    packed_sums,
    weight_kernel_constants,
)
from sglang_lite.runtime.kernels.packed_weight import SLICES, PackedWeight
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv
from sglang_lite.runtime.kernels.tile_order import tile_of_program

MAX_BLOCK = 64  # maximum number of rows in a block


@cached_launch
@triton.jit(do_not_specialize=["blocks", "count", "BLOCKS"])
def _gate_up(
    x,
    words,
    scales,
    table,
    bias,
    pairs,
    block_experts,
    out,
    blocks,
    count,
    rows,
    BLOCKS,
    alpha,
    limit,
    TOP: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    HALF: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    OUTPUTS: tl.constexpr = BLOCK_N // 2
    block, tile = tile_of_program(blocks, (N + OUTPUTS - 1) // OUTPUTS)
    expert = tl.load(block_experts + block)
    if expert >= 0:
        m, row = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
        pair = tl.load(pairs + block * BLOCK_M + m)
        valid = pair < count
        token = tl.where(valid, pair // TOP, 0).to(tl.int64)
        # Gates, then as many ups; without masks, as what is too much is not stored.
        n = (
            expert * (2 * N)
            + row // OUTPUTS * N
            + tl.minimum(tile * OUTPUTS + row % OUTPUTS, N - 1)
        )
        acc = packed_sums(
            x + token * K,
            valid,
            words,
            scales,
            table,
            n,
            rows,
            K,
            BLOCKS,
            0,
            1,
            KIND,
            ZERO,
            HALF,
            SLICE,
            GROUP,
            TOGETHER,
            SLICE,
            False,
            WHOLE,
            x.dtype.element_ty,
        )
        start_next(PDL)  # not earlier, as not all programs fit the GPU at once
        if BIAS:
            acc += tl.load(bias + n).to(tl.float32)[:, None]
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, OUTPUTS, BLOCK_M)), (1, 2, 0)))
        result = gated_pair(gate, up, alpha, limit, ACTIVATION)
        outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        place = out + (block * BLOCK_M + m).to(tl.int64)[None, :] * N + outputs[:, None]
        tl.store(place, result.to(out.dtype.element_ty), mask=(outputs < N)[:, None])


@cached_launch
@triton.jit(do_not_specialize=["blocks", "count", "BLOCKS"])
def _down(
    hidden,
    words,
    scales,
    table,
    bias,
    weights,
    base,
    pairs,
    block_experts,
    out,
    blocks,
    count,
    rows,
    BLOCKS,
    TOP: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    HALF: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    WHOLE: tl.constexpr,
    BIAS: tl.constexpr,
    BASE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    block, tile = tile_of_program(blocks, (N + BLOCK_N - 1) // BLOCK_N)
    expert = tl.load(block_experts + block)
    if expert >= 0:
        m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        outputs = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        pair = tl.load(pairs + m)
        valid = pair < count
        n = expert * N + tl.minimum(outputs, N - 1)
        acc = packed_sums(
            hidden + m.to(tl.int64) * K,
            valid,
            words,
            scales,
            table,
            n,
            rows,
            K,
            BLOCKS,
            0,
            1,
            KIND,
            ZERO,
            HALF,
            SLICE,
            GROUP,
            TOGETHER,
            SLICE,
            False,
            WHOLE,
            hidden.dtype.element_ty,
        )
        start_next(PDL)
        if BIAS:
            acc += tl.load(bias + n).to(tl.float32)[:, None]
        acc *= tl.load(weights + pair, mask=valid, other=0.0)[None, :]
        token, part = (pair // TOP).to(tl.int64)[None, :], pair % TOP
        here = valid[None, :] & (outputs < N)[:, None]
        if BASE:
            mask = here & (part == 0)[None, :]
            acc += tl.load(base + token * N + outputs[:, None], mask=mask, other=0.0).to(tl.float32)
        place = out + (part[None, :] * (count // TOP) + token) * N + outputs[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=here)


def packed_gate_up(
    x: torch.Tensor,
    weight: PackedWeight,
    experts: int,
    blocks: ExpertBlocks,
    top: int,
    activation: str,
    *,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> torch.Tensor:
    """Returns act(gate) * up for the rows of the blocks.

    Args:
        x: [T, K], contiguous.
        weight: [E * 2 N, K], each expert's gates before its ups.
        experts: number of experts, E.
        blocks: pairs of the tokens, by expert, in blocks of at most MAX_BLOCK.
        top: experts of a token.
        activation: "silu", "gelu", "gelu_tanh" or "clamped".
        bias: [E, 2 N] or None.
        alpha, limit: parameters of "clamped".

    Returns:
        [blocks * size, N]. Rows without a pair are undefined.
    """
    outputs = len(weight.words) // (2 * experts)
    out = x.new_empty((len(blocks.pairs), outputs))
    count = len(blocks.experts)
    _gate_up[(count * cdiv(outputs, _rows_per_program(x, blocks) // 2),)](
        x,
        weight.words,
        weight.scales,
        weight.table,
        bias,
        blocks.pairs,
        blocks.experts,
        out,
        count,
        len(x) * top,
        len(weight.words),
        count_column_blocks(weight),
        alpha,
        limit,
        TOP=top,
        K=weight.inputs,
        N=outputs,
        BIAS=bias is not None,
        ACTIVATION=activation,
        **_launch_options(weight, x, blocks),
    )
    return out


def packed_down(
    hidden: torch.Tensor,
    weight: PackedWeight,
    experts: int,
    blocks: ExpertBlocks,
    weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    partial: bool = False,
) -> torch.Tensor:
    """Returns the weighted outputs of the experts for the blocks' hidden states. The caller must
    add the outputs up.

    Args:
        hidden: [blocks * size, K], contiguous.
        weight: [E * N, K].
        experts: number of experts, E.
        blocks: pairs of the tokens, by expert, in blocks of at most MAX_BLOCK.
        weights: float32 [T, top], contiguous.
        bias: [E, N] or None.
        base: [T, N], contiguous, added to the output of each token's first expert, or None.
        partial: as for `experts_down`.

    Returns:
        [top, T, N].
    """
    outputs = len(weight.words) // experts
    count = len(blocks.experts)
    make = hidden.new_zeros if partial else hidden.new_empty
    out = make((weights.shape[1], len(weights), outputs))
    _down[(count * cdiv(outputs, _rows_per_program(hidden, blocks)),)](
        hidden,
        weight.words,
        weight.scales,
        weight.table,
        bias,
        weights,
        base,
        blocks.pairs,
        blocks.experts,
        out,
        count,
        weights.numel(),
        len(weight.words),
        count_column_blocks(weight),
        TOP=weights.shape[1],
        K=weight.inputs,
        N=outputs,
        BIAS=bias is not None,
        BASE=base is not None,
        **_launch_options(weight, hidden, blocks),
    )
    return out


def _launch_options(
    weight: PackedWeight, x: torch.Tensor, blocks: ExpertBlocks
) -> dict[str, object]:
    """Returns the constants and launch options that `packed_gate_up` and `packed_down` share."""
    assert blocks.size <= MAX_BLOCK
    rows = _rows_per_program(x, blocks)
    # bytes of words, and of inputs
    stage = weight.slice * (rows * 2 + SLICES * blocks.size * x.element_size())
    return {
        **weight_kernel_constants(weight),
        "TOGETHER": math.gcd(weight.group // weight.slice, SLICES),
        "WHOLE": weight.inputs % (SLICES * weight.slice) == 0,
        "BLOCK_M": blocks.size,
        "BLOCK_N": rows,
        "num_warps": 4,
        "num_stages": max(1, min(3, (properties_of(x.device).shared_memory - SCRATCH) // stage)),
        **pdl_options(x.device),
    }


def _rows_per_program(x: torch.Tensor, blocks: ExpertBlocks) -> int:
    """Returns how many matrix rows a program multiplies: 128, or 64 if registers would overflow
    with 128. They would overflow for blocks of many tokens.

    Before Hopper, registers also hold the operands, and would overflow for any block.
    """
    return 128 if blocks.size <= 16 and properties_of(x.device).has_tma else 64
