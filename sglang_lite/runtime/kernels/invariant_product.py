"""Multiplies any number of rows by a weight matrix so that a row's bits do not depend on the other
rows (batch-invariant; He et al., "Defeating Nondeterminism in LLM Inference", 2025).

How K is split into parts depends only on the shape of the matrix. For few rows, each program
computes one part; for many rows, a program computes all parts one after the other. Both add the
parts up in the same order. Tiles are chosen for speed: a Hopper GPU adds up the inputs of a matmul
in one order for every tile, order of operands, number of warps and kind of matrix instruction
(measured on an H200 with 13 tiles). Weights are the left operand, as few rows fill the right one
better.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.activation import apply_activation
from sglang_lite.runtime.kernels.descriptors import tensor_descriptor
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.launch_config import tile_stages
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2
from sglang_lite.runtime.kernels.tile_order import tile_of_program

_BLOCK_K = 128  # inputs of a step of the sum
_OUTPUTS = 64  # minimum number of outputs of a program
_MAX_SPLIT_ROWS = 256
_PROGRAMS = 132  # programs that a product of few rows should have, whatever the GPU


@triton.jit
def _sum(
    x,
    w,
    row,
    first,
    begin,
    end,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Multiplies a tile of weights by a tile of rows, summing over the inputs from `begin` to
    `end`.
    """
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(begin, end, BLOCK_K):
        acc = tl.dot(w.load([first, k]), x.load([row, k]).T, acc, input_precision="ieee")
    return acc


@cached_launch
@triton.jit(do_not_specialize=["M"])
def _product(
    x,
    w,
    bias,
    y,
    M,
    N,
    K,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
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
    if GATE != "":
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, K, BLOCK_K):
            rows = x.load([row, k]).T
            acc = tl.dot(w.load([first, k]), rows, acc, input_precision="ieee")
            up = tl.dot(w.load([N + first, k]), rows, up, input_precision="ieee")
    elif SPLIT:
        part = tl.program_id(1)
        y += part * M * N
        acc = _sum(
            x,
            w,
            row,
            first,
            part * (K // PARTS),
            (part + 1) * (K // PARTS),
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
    else:
        acc = _sum(x, w, row, first, 0, K // PARTS if PARTS > 1 else K, BLOCK_M, BLOCK_N, BLOCK_K)
        for part in range(1, PARTS):
            acc += _sum(
                x,
                w,
                row,
                first,
                part * (K // PARTS),
                (part + 1) * (K // PARTS),
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
            )
    if not EARLY:
        start_next(PDL)
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = acc.to(y.dtype.element_ty)
    if GATE != "":
        if BIAS:
            up += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        # Rounded as separate operations would.
        gate = apply_activation(out.to(tl.float32), GATE).to(out.dtype).to(tl.float32)
        out = (gate * up.to(out.dtype).to(tl.float32)).to(out.dtype)
    tl.store(
        y + m.to(tl.int64)[None, :] * N + n[:, None], out, mask=(m < M)[None, :] & (n < N)[:, None]
    )


def invariant_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate: str = "",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns x [M, K] times weight [N, K] transposed, plus bias [N], as [M, N].

    Args:
        x: [M, K], contiguous.
        weight: [N, K], which must satisfy `tiled.can_tile`; with `gate` [2 N, K], gates first.
        bias: [N], with `gate` [2 N]; or None.
        gate: activation of a gated pair ("silu", "gelu", "gelu_tanh"), or "".
        out: [M, N] (written and returned), or None for a new tensor.
    """
    outputs = len(weight) // 2 if gate else len(weight)
    y = x.new_empty((len(x), outputs)) if out is None else out
    _launch(x, weight, bias, y, gate, split=False)
    return y


def invariant_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the result of `invariant_linear` without a bias. Where it is faster, returns partial
    sums float32 [parts, M, N], which the caller must add up in order.
    """
    parts = _invariant_reduction_splits(weight)
    if parts == 1 or len(x) > _MAX_SPLIT_ROWS:
        return invariant_linear(x, weight, None)
    y = torch.empty((parts, len(x), len(weight)), dtype=torch.float32, device=x.device)
    _launch(x, weight, None, y, "", split=True)
    return y


def _invariant_reduction_splits(weight: torch.Tensor) -> int:
    """Returns the number of parts that the reduction is split into for this matrix."""
    outputs, inputs = weight.shape
    most = _PROGRAMS // cdiv(outputs, _OUTPUTS)
    return next((n for n in (8, 4, 2) if n <= most and inputs % (n * _BLOCK_K) == 0), 1)


def _launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    gate: str,
    *,
    split: bool,
) -> None:
    (rows, inputs), outputs, parts = (
        x.shape,
        y.shape[-1],
        1 if gate else _invariant_reduction_splits(weight),
    )
    properties = properties_of(x.device)
    block_m, block_n, block_k, warps = _invariant_tile_shape(rows, split=split)
    programs = cdiv(outputs, block_n) * cdiv(rows, block_m)
    stages = tile_stages(properties, block_m, (2 if gate else 1) * block_n, block_k, 2, 6)
    _product[(programs, parts if split else 1)](
        tensor_descriptor(x, inputs, (block_m, block_k)),
        tensor_descriptor(weight, inputs, (block_n, block_k)),
        bias,
        y,
        rows,
        outputs,
        inputs,
        BIAS=bias is not None,
        GATE=gate,
        PARTS=parts,
        SPLIT=split,
        EARLY=rows <= 64 and programs * (parts if split else 1) <= properties.multiprocessors,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        num_stages=stages,
        **pdl_options(x.device),
    )


def _invariant_tile_shape(rows: int, *, split: bool) -> tuple[int, int, int, int]:
    """Returns the rows, outputs and inputs of a tile, and the number of warps per program. None of
    them affects the bits of the result.
    """
    if rows <= 64:
        return max(16, round_up_to_power_of_2(rows)), _OUTPUTS, _BLOCK_K, 4
    if rows <= 128 or split:
        return round_up_to_power_of_2(min(rows, _MAX_SPLIT_ROWS)), _OUTPUTS, 64, 4
    return 128, 128, 64, 8
