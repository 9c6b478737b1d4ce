"""Multiplies rows by a weight matrix, both of 8-bit integers, with a scale for each row and each
output.

    y[m, n] = row_scales[m] * scales[n] * (x[m, :] . w[n, :]) + bias[n]

Sums are 32-bit integers, so they are exact, and no order of summation changes a bit. Weights are
the left operand, as few rows fill the right one better. Weights are read once for up to 256 rows;
beyond that, tiles of rows that share a tile of weights run side by side. Moves N K + M K bytes and
the result, 2 M N bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.descriptors import tensor_descriptor
from sglang_lite.runtime.kernels.device_properties import DeviceProperties, properties_of
from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows
from sglang_lite.runtime.kernels.launch_config import tile_stages
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2
from sglang_lite.runtime.kernels.tile_order import tile_of_program

MAX_SPLIT_ROWS = 64  # maximum number of rows of a product whose sums are split
_STEP = 128  # the inputs of a part of a sum are a multiple of this


@cached_launch
@triton.jit(do_not_specialize=["M"])
def _product(
    x,
    row_scales,
    w,
    scales,
    bias,
    y,
    M,
    N,
    K,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if EARLY:
        start_next(PDL)
    wait(PDL)
    row_tile, output_tile = tile_of_program(tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N))
    row, first = row_tile * BLOCK_M, output_tile * BLOCK_N
    m, n = row + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
    begin, end = 0, K
    if PARTS > 1:
        begin = tl.program_id(1) * (K // PARTS)
        end = begin + K // PARTS
        y += tl.program_id(1) * M * N
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32)
    for k in range(begin, end, BLOCK_K):
        acc = tl.dot(w.load([first, k]), x.load([row, k]).T, acc, out_dtype=tl.int32)
    if not EARLY:
        start_next(PDL)  # not earlier, as not all programs fit the GPU at once
    by_row, by_output = (
        tl.load(row_scales + m, mask=m < M, other=0.0),
        tl.load(scales + n, mask=n < N, other=0.0),
    )
    out = acc.to(tl.float32) * by_output[:, None] * by_row[None, :]
    if BIAS:
        out += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    inner = (m < M)[None, :] & (n < N)[:, None]
    tl.store(y + m.to(tl.int64)[None, :] * N + n[:, None], out.to(y.dtype.element_ty), mask=inner)


def int8_linear(
    x: EightBitRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns x [M, K] times weight [N, K] transposed, with their scales, plus bias [N], as [M, N].

    Args:
        x: rows of int8.
        weight: int8 [N, K]; K is a multiple of 16.
        scales: float32 [N].
        bias: [N], or None.
        dtype: data type of the result.
    """
    y = torch.empty((x.rows, len(weight)), dtype=dtype, device=weight.device)
    _launch(x, weight, scales, bias, y, parts=1)
    return y


def int8_parts(
    x: EightBitRows, weight: torch.Tensor, scales: torch.Tensor, parts: int
) -> torch.Tensor:
    """Returns the result of `int8_linear` without a bias, as partial sums float32 [parts, M, N]
    that the caller must add up.

    Args:
        x: up to MAX_SPLIT_ROWS rows.
        weight, scales: as for `int8_linear`.
        parts: number of parts, more than one, as returned by `int8_reduction_splits`.
    """
    y = torch.empty((parts, x.rows, len(weight)), dtype=torch.float32, device=weight.device)
    _launch(x, weight, scales, None, y, parts=parts)
    return y


def int8_reduction_splits(weight: torch.Tensor) -> int:
    """Returns how many parts to split the reduction into when few rows are multiplied by this
    matrix: as many as idle multiprocessors allow, at most four.
    """
    outputs, inputs = weight.shape
    most = properties_of(weight.device).multiprocessors // cdiv(outputs, 64)
    return next((n for n in (4, 2) if n <= most and inputs % (n * _STEP) == 0), 1)


def _launch(
    x: EightBitRows,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    *,
    parts: int,
) -> None:
    outputs, inputs = weight.shape
    properties = properties_of(weight.device)
    block_m, block_n, block_k, warps = _int8_tile_shape(
        x.rows, outputs, inputs // parts, properties
    )
    programs = cdiv(outputs, block_n) * cdiv(x.rows, block_m)
    _product[(programs, parts)](
        tensor_descriptor(x.values, inputs, (block_m, block_k)),
        x.scales,
        tensor_descriptor(weight, inputs, (block_n, block_k)),
        scales,
        bias,
        y,
        x.rows,
        outputs,
        inputs,
        BIAS=bias is not None,
        PARTS=parts,
        EARLY=x.rows <= MAX_SPLIT_ROWS and programs * parts <= properties.multiprocessors,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=tile_stages(properties, block_m, block_n, block_k, 1, 6),
        **pdl_options(weight.device),
    )


def _int8_tile_shape(
    rows: int, outputs: int, inputs: int, properties: DeviceProperties
) -> tuple[int, int, int, int]:
    """Returns the rows, outputs and inputs of a tile, and the number of warps per program.

    For few rows, programs mostly wait for weights: tiles are long if there is a multiprocessor for
    every program. For many rows, tiles are the smallest with which every program has a
    multiprocessor. Without TMA, tiles are small, because registers also hold the operands.
    """
    few = min(MAX_SPLIT_ROWS, max(16, round_up_to_power_of_2(rows)))
    programs = cdiv(outputs, 64)
    if not properties.has_tma:
        return few, 64, 64, 4
    if rows <= MAX_SPLIT_ROWS:
        return (
            few,
            64,
            256 if inputs % 256 == 0 and programs <= properties.multiprocessors else 128,
            4,
        )
    for block_n in (64, 128):
        if rows <= 128 or cdiv(rows, 128) * cdiv(outputs, block_n) <= properties.multiprocessors:
            return 128, block_n, 128, 4
    return 256, 128, 128, 8
