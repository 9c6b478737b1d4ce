"""Multiplies blocks of tokens (`experts_order`) by their experts' matrices, whose tiles the copy
engine loads (TMA).

    hidden[row] = act(gate[e] x[t]) * (up[e] x[t])    e: the row's expert, t: token of its pair
    y[j, t] = weights[pair] * (down[e] hidden[row])   j: index of the expert among the token's;
                                                      plus base[t] if j is 0
    out[t] = sum over j of y[j, t]

An expert's matrix is read once for each of its blocks, by neighbouring programs. The grid covers
the maximum number of blocks; programs of unused blocks return immediately. Matmuls are transposed,
with rows as columns, so that even a few fill the tensor cores' tiles of 64 (weights) by 8. Sums are
in float32 and stored in the data type of x; `out` is summed in the order of j.

Weights may be in 8 bits (e4m3) with a scale for each block of 128 by 128. Tokens are then in 8
bits, too, with one scale each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.activation import gated_pair
from sglang_lite.runtime.kernels.descriptors import tensor_descriptor
from sglang_lite.runtime.kernels.device_properties import DeviceProperties, properties_of
from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows
from sglang_lite.runtime.kernels.experts_order import ExpertBlocks
from sglang_lite.runtime.kernels.launch_config import tile_stages
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2
from sglang_lite.runtime.kernels.tile_order import tile_of_program


@triton.jit
def _add_product(acc, w, row, at, columns, scales, EIGHT: tl.constexpr):
    """Returns acc plus the product of a tile of weights and columns; `scales` are those of the
    tile's row of blocks.
    """
    weights = w.load([row, at])
    if EIGHT:
        return acc + tl.dot(weights, columns) * tl.load(scales + at // 128)
    return tl.dot(weights, columns, acc, input_precision="ieee")


@cached_launch
@triton.jit(do_not_specialize=["blocks", "count"])
def _gate_up(
    x,
    x_scales,
    w,
    scales,
    bias,
    pairs,
    block_experts,
    out,
    blocks,
    count,
    alpha,
    limit,
    TOP: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    EIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    block, tile = tile_of_program(blocks, (N + BLOCK_N - 1) // BLOCK_N)
    expert = tl.load(block_experts + block)
    first = tile * BLOCK_N
    m = tl.arange(0, BLOCK_M)
    n = first + tl.arange(0, BLOCK_N)
    place = out + (block * BLOCK_M + m).to(tl.int64)[None, :] * N + n[:, None]
    if expert >= 0:
        k = tl.arange(0, BLOCK_K)
        pair = tl.load(pairs + block * BLOCK_M + m)
        valid = pair < count
        token = tl.where(valid, pair // TOP, 0)
        rows = x + token.to(tl.int64)[:, None] * K + k[None, :]
        gate_row = expert * (2 * N) + first
        gate_scales = scales
        up_scales = scales
        if EIGHT:
            gate_scales += gate_row // 128 * (K // 128)
            up_scales += (gate_row + N) // 128 * (K // 128)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for at in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                values = tl.load(rows + at, mask=valid[:, None], other=0.0)
            else:
                values = tl.load(rows + at, mask=valid[:, None] & (at + k < K)[None, :], other=0.0)
            acc = _add_product(acc, w, gate_row, at, values.T, gate_scales, EIGHT)
            up = _add_product(up, w, gate_row + N, at, values.T, up_scales, EIGHT)
        start_next(PDL)  # not earlier, as not all programs fit the GPU at once
        if EIGHT:
            factors = tl.load(x_scales + token)[None, :]
            acc *= factors
            up *= factors
        if BIAS:
            own = bias + expert * (2 * N) + n
            acc += tl.load(own, mask=n < N, other=0.0).to(tl.float32)[:, None]
            up += tl.load(own + N, mask=n < N, other=0.0).to(tl.float32)[:, None]
        result = gated_pair(acc, up, alpha, limit, KIND).to(out.dtype.element_ty)
        if N % BLOCK_N == 0:
            tl.store(place, result)
        else:
            tl.store(place, result, mask=(n < N)[:, None])
    elif EIGHT:  # all rows are quantised later, so none may be undefined
        tl.store(place, tl.zeros((BLOCK_N, BLOCK_M), out.dtype.element_ty), mask=(n < N)[:, None])


@cached_launch
@triton.jit(do_not_specialize=["blocks", "count"])
def _down(
    hidden,
    hidden_scales,
    w,
    scales,
    bias,
    weights,
    base,
    pairs,
    block_experts,
    out,
    blocks,
    count,
    TOP: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    EIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    BASE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    block, tile = tile_of_program(blocks, (N + BLOCK_N - 1) // BLOCK_N)
    expert = tl.load(block_experts + block)
    if expert >= 0:
        first = tile * BLOCK_N
        row = expert * N + first
        if EIGHT:
            scales += row // 128 * (K // 128)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for at in range(0, K, BLOCK_K):
            values = hidden.load([block * BLOCK_M, at])
            acc = _add_product(acc, w, row, at, values.T, scales, EIGHT)
        start_next(PDL)
        m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        if EIGHT:
            acc *= tl.load(hidden_scales + m)[None, :]
        n = first + tl.arange(0, BLOCK_N)
        if BIAS:
            acc += tl.load(bias + expert * N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        pair = tl.load(pairs + m)
        valid = pair < count
        acc *= tl.load(weights + pair, mask=valid, other=0.0)[None, :]
        token, part = (pair // TOP).to(tl.int64)[None, :], pair % TOP
        here = valid[None, :] & (n < N)[:, None]
        if BASE:
            mask = here & (part == 0)[None, :]
            acc += tl.load(base + token * N + n[:, None], mask=mask, other=0.0).to(tl.float32)
        place = out + (part[None, :] * (count // TOP) + token) * N + n[:, None]
        tl.store(place, acc.to(out.dtype.element_ty), mask=here)


@cached_launch
@triton.jit
def _sum(y, out, tokens, N, TOP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP):
        total += tl.load(y + (token + j * tokens) * N + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)


def can_tile_experts(weight: torch.Tensor) -> bool:
    """Returns whether matrices of experts can be multiplied in tiles: their rows must be a multiple
    of 16 bytes.
    """
    return weight.shape[2] * weight.element_size() % 16 == 0


def block_rows(tokens: int, top: int, experts: int) -> int:
    """Returns the number of rows per block. It is chosen so that few experts need a second block,
    and blocks have little padding.
    """
    mean = tokens * top / experts
    return next((size for size in (16, 32, 64) if mean + 2.5 * mean**0.5 <= size), 128)


def experts_gate_up(
    x: torch.Tensor | EightBitRows,
    weight: torch.Tensor,
    blocks: ExpertBlocks,
    top: int,
    activation: str,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> torch.Tensor:
    """Returns act(gate) * up for the rows of the blocks. Reads 2 N K elements of weights and a
    block of x for each used block.

    Args:
        x: [T, K], contiguous; in 8 bits if the weights are.
        weight: [E, 2 N, K], contiguous, gates first; must satisfy `can_tile_experts`.
        blocks: pairs of the tokens, by expert.
        top: experts of a token.
        activation: "silu", "gelu", "gelu_tanh" or "clamped".
        scales: float32 [E, 2 N / 128, K / 128] for 8-bit weights, else None.
        bias: [E, 2 N] or None.
        alpha, limit: parameters of "clamped".

    Returns:
        [blocks * size, N], in bfloat16 if x is in 8 bits. Rows without a pair are undefined.
    """
    _, both, inputs = weight.shape
    outputs = both // 2
    count = len(blocks.experts)
    rows, values, row_scales, dtype = _unpack_input_rows(x)
    out = torch.empty((len(blocks.pairs), outputs), dtype=dtype, device=values.device)
    block_n, block_k, warps, stages = gate_up_launch(
        properties_of(out.device), blocks.size, values.element_size()
    )
    _gate_up[(count * cdiv(outputs, block_n),)](
        values,
        row_scales,
        tensor_descriptor(weight, inputs, (block_n, block_k)),
        scales,
        bias,
        blocks.pairs,
        blocks.experts,
        out,
        count,
        rows * top,
        alpha,
        limit,
        TOP=top,
        K=inputs,
        N=outputs,
        EIGHT=scales is not None,
        BIAS=bias is not None,
        KIND=activation,
        BLOCK_M=blocks.size,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
        **pdl_options(out.device),
    )
    return out


def experts_down(
    hidden: torch.Tensor | EightBitRows,
    weight: torch.Tensor,
    blocks: ExpertBlocks,
    weights: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    partial: bool = False,
) -> torch.Tensor:
    """Returns the weighted outputs of the experts for the blocks' hidden states. The caller must
    add the outputs up. Reads N K elements of weights and a block of hidden states for each used
    block.

    Args:
        hidden: [blocks * size, K], contiguous; in 8 bits if the weights are.
        weight: [E, N, K], contiguous; must satisfy `can_tile_experts`.
        blocks: pairs of the tokens, by expert.
        weights: float32 [T, top], contiguous.
        scales: float32 [E, N / 128, K / 128] for 8-bit weights, else None.
        bias: [E, N] or None.
        base: [T, N], contiguous, added to the output of each token's first expert, or None.
        partial: whether pairs may be in no block, as their experts are on other ranks: their output
            is zero.

    Returns:
        [top, T, N], in the data type of the result of `experts_gate_up`.
    """
    _, outputs, inputs = weight.shape
    pairs = weights.numel()
    count = len(blocks.experts)
    _, values, row_scales, dtype = _unpack_input_rows(hidden)
    make = torch.zeros if partial else torch.empty
    out = make((weights.shape[1], len(weights), outputs), dtype=dtype, device=values.device)
    block_n, block_k, warps, stages = down_launch(
        properties_of(out.device), blocks.size, values.element_size()
    )
    _down[(count * cdiv(outputs, block_n),)](
        tensor_descriptor(values, inputs, (blocks.size, block_k)),
        row_scales,
        tensor_descriptor(weight, inputs, (block_n, block_k)),
        scales,
        bias,
        weights,
        base,
        blocks.pairs,
        blocks.experts,
        out,
        count,
        pairs,
        TOP=weights.shape[1],
        K=inputs,
        N=outputs,
        EIGHT=scales is not None,
        BIAS=bias is not None,
        BASE=base is not None,
        BLOCK_M=blocks.size,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
        **pdl_options(out.device),
    )
    return out


def experts_sum(y: torch.Tensor) -> torch.Tensor:
    """Returns the sum of y [top, T, N] over each token's experts, [T, N]. Moves (top + 1) T N
    elements.
    """
    top, tokens, outputs = y.shape
    out = torch.empty((tokens, outputs), dtype=y.dtype, device=y.device)
    block = min(1024, round_up_to_power_of_2(outputs))
    _sum[(tokens, cdiv(outputs, block))](
        y, out, tokens, outputs, TOP=top, BLOCK=block, num_warps=4, **pdl_options(y.device)
    )
    return out


def _unpack_input_rows(
    x: torch.Tensor | EightBitRows,
) -> tuple[int, torch.Tensor, torch.Tensor | None, torch.dtype]:
    """Returns the number of rows of x, their values, their scales if x is in 8 bits, and the data
    type of the matmul's result.
    """
    if isinstance(x, EightBitRows):
        return x.rows, x.values, x.scales, torch.bfloat16
    return len(x), x, None, x.dtype


def gate_up_launch(properties: DeviceProperties, rows: int, item: int) -> tuple[int, int, int, int]:
    """Returns BLOCK_N, BLOCK_K, warps and stages for blocks of `rows` rows and elements of `item`
    bytes. Measured on an H200 with Qwen3-30B-A3B's shape.
    """
    if item > 2:
        block_n = 32
        block_k = 32
        warps = 4
        max_stages = 2
    # registers hold the operands, and larger tiles overflow them
    elif rows > 16 and not properties.has_tma:
        block_n, block_k, warps, max_stages = (
            (64, 64 // item, 4, 3) if rows <= 64 else (64, 128 // item, 8, 3)
        )
    elif item == 1:
        block_n, block_k, warps, max_stages = (64, 128, 4, 3) if rows <= 64 else (128, 128, 8, 3)
    else:
        block_n, block_k, warps, max_stages = (64, 128, 4, 2) if rows <= 64 else (128, 64, 8, 4)
    return (
        block_n,
        block_k,
        warps,
        tile_stages(properties, rows, 2 * block_n, block_k, item, max_stages),
    )


def down_launch(properties: DeviceProperties, rows: int, item: int) -> tuple[int, int, int, int]:
    """Returns launch parameters of `_down`, in the order of `gate_up_launch`."""
    if item > 2:
        block_n = 32
        block_k = 32
        max_stages = 2
    elif item == 1:
        block_n = 128 if properties.has_tma or rows <= 64 else 64
        block_k = 128
        max_stages = 3
    else:
        block_n = 128
        block_k = 64
        max_stages = 4 if rows <= 64 else 3
    return block_n, block_k, 4, tile_stages(properties, rows, block_n, block_k, item, max_stages)
