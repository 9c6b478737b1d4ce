"""Multiplies a few rows by a weight matrix [N, K]. Reading the weights takes most of the time.

Weights are read once, at 80 to 103 % of an H200's copy rate for one row (cuBLAS: 65 to 90 %). For a
single row the neighbouring operations are fused in: they read little, and a separate kernel costs
as much as a small product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.activation import apply_activation
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

MAX_ROWS = 32  # above this, `tiled` or cuBLAS is faster
SPLIT_OUTPUTS = 4096  # most outputs of a matrix whose products are split along K
HEAD = 1 << 16  # a matrix with at least this many outputs is most likely a model's head
SMALL = 1 << 24  # most elements of a matrix that gets the launch of small ones
_TINY = 1 << 24  # most bytes of a small matrix for which the next kernel is set up early


@cached_launch
@triton.jit
def _gemv(
    x,
    residual,
    norm,
    w,
    scales,
    bias,
    y,
    residual_out,
    N,
    K,
    eps,
    SCALED: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATE: tl.constexpr,
    PREFETCH: tl.constexpr,
    EARLY: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = w + n.to(tl.int64)[:, None] * K + k[None, :]
    ups = rows + tl.full((), N, tl.int64) * K
    valid = (n < N)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    squares = tl.zeros((BLOCK_K,), tl.float32)
    first = valid & (k < K)[None, :]
    # no kernel writes weights, so the first loads start before the previous kernels finish
    if PREFETCH:
        weights = tl.load(rows, mask=first, other=0.0, eviction_policy="evict_first")
        up_weights = weights
        if GATE != "":
            up_weights = tl.load(ups, mask=first, other=0.0, eviction_policy="evict_first")
        if EARLY:
            # takes effect when all programs have begun; then the next kernel prefetches, too
            start_next(PDL)
    wait(PDL)
    for at in range(0, BLOCK_K if WHOLE else K, BLOCK_K):
        inside = at + k < K
        if not PREFETCH:
            weights = tl.load(
                rows + at, mask=valid & inside[None, :], other=0.0, eviction_policy="evict_first"
            )
            up_weights = weights
            if GATE != "":
                up_weights = tl.load(
                    ups + at, mask=valid & inside[None, :], other=0.0, eviction_policy="evict_first"
                )
        value = tl.load(x + at + k, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            # Rounded to the data type of the residual stream first, as in add_norm. Stored in a
            # separate tensor, as other programs still read the residual.
            value += tl.load(residual + at + k, mask=inside, other=0.0).to(tl.float32)
            rounded = value.to(x.dtype.element_ty)
            if tl.program_id(0) == 0:
                tl.store(residual_out + at + k, rounded, mask=inside)
            value = rounded.to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(norm + at + k, mask=inside, other=0.0).to(tl.float32)
        acc += weights.to(tl.float32) * value[None, :]
        if GATE != "":
            up += up_weights.to(tl.float32) * value[None, :]
        if PREFETCH and not WHOLE:
            later = at + BLOCK_K
            both = valid & (later + k < K)[None, :]
            weights = tl.load(rows + later, mask=both, other=0.0, eviction_policy="evict_first")
            if GATE != "":
                up_weights = tl.load(
                    ups + later, mask=both, other=0.0, eviction_policy="evict_first"
                )
    if not EARLY:
        start_next(PDL)  # not earlier: waiting programs would block those yet to start
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares) / K + eps)
    total = tl.sum(acc, 1) * scale
    if SCALED:
        total *= tl.load(scales + n, mask=n < N, other=0.0)
    if BIAS:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    if GATE != "":
        other = tl.sum(up, 1) * scale
        if SCALED:
            other *= tl.load(scales + N + n, mask=n < N, other=0.0)
        if BIAS:
            other += tl.load(bias + N + n, mask=n < N, other=0.0).to(tl.float32)
        total = apply_activation(total, GATE) * other
    tl.store(y + n, total.to(y.dtype.element_ty), mask=n < N)


@cached_launch
@triton.jit(do_not_specialize=["M"])
def _small_batch(
    x,
    w,
    bias,
    y,
    partials,
    counters,
    M,
    N,
    K,
    BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    rows = w + n.to(tl.int64)[:, None] * K
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for at in range(split * BLOCK_K, K, BLOCK_K * SPLITS):
        inside = at + k < K
        weights = tl.load(
            rows + (at + k)[None, :], mask=(n < N)[:, None] & inside[None, :], other=0.0
        )
        values = tl.load(
            x + m[None, :] * K + (at + k)[:, None],
            mask=(m < M)[None, :] & inside[:, None],
            other=0.0,
        )
        acc = tl.dot(weights, values, acc, input_precision="ieee")
    if SPLITS > 1:
        part: tl.constexpr = BLOCK_N * BLOCK_M
        place = (
            partials + tile * SPLITS * part + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        )
        tl.store(place + split * part, acc)
        tl.debug_barrier()  # all threads have stored before one signals
        finished = tl.atomic_add(counters + tile, 1, sem="acq_rel")
        if finished < SPLITS - 1:
            return
        tl.store(counters + tile, 0)
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for i in range(SPLITS):  # in a fixed order, so that the sum is deterministic
            acc += tl.load(place + i * part, cache_modifier=".cg")
    if BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    inside = (n < N)[:, None] & (m < M)[None, :]
    tl.store(y + m[None, :] * N + n[:, None], acc.to(y.dtype.element_ty), mask=inside)


def linear_single_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    scales: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gate: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes weight @ x for a single row x [1, K], fused with the operations before and after it.

        total = x + residual
        y = norm(total) @ weight.T * scales + bias      with `gate`: y = act(gates) * ups

    Args:
        x: [1, K].
        weight: [N, K]; with `gate` [2 N, K], gates first.
        bias: [N], with `gate` [2 N]; or None.
        scales: float32, one for each row of an 8-bit weight, which is multiplied by it; or None.
        residual: [1, K], added to x first, or None.
        norm: [K], weight of the RMS norm of that sum, or None.
        eps: epsilon of the norm.
        gate: activation of a gated pair ("silu", "gelu", "gelu_tanh"), or "".

    Returns:
        The product [1, N], and the sum of x and residual [1, K] (x itself without a residual).
    """
    rows, inputs = weight.shape
    outputs = rows // 2 if gate else rows
    y = torch.empty((1, outputs), dtype=x.dtype, device=x.device)
    total = x if residual is None else x.new_empty(x.shape)
    launch = _gemv_launch(
        rows, inputs, weight.element_size(), without_norm=norm is None, gated=bool(gate)
    )
    _gemv[(cdiv(outputs, launch.outputs),)](
        x,
        residual,
        norm,
        weight,
        scales,
        bias,
        y,
        total,
        outputs,
        inputs,
        eps,
        SCALED=scales is not None,
        ADD=residual is not None,
        NORM=norm is not None,
        BIAS=bias is not None,
        GATE=gate,
        PREFETCH=launch.prefetch,
        EARLY=launch.early,
        WHOLE=inputs <= launch.inputs,
        BLOCK_N=launch.outputs,
        BLOCK_K=launch.inputs,
        num_warps=launch.warps,
        # The head's neighbours are too short to be worth overlapping.
        **(pdl_options(x.device) if rows < HEAD else {"PDL": False}),
    )
    return y, total


@dataclass(frozen=True, slots=True)
class _Launch:
    """Launch parameters of `_gemv`.

    Attributes:
        outputs, inputs: tile of a program in one iteration of its loop; for a gated pair, the
            outputs of each half.
        warps: warps of a program.
        prefetch: True if the first weights are loaded before the previous kernels finish.
        early: True if the next kernel is also set up before that.
    """

    outputs: int
    inputs: int
    warps: int
    prefetch: bool = False
    early: bool = False


def _gemv_launch(
    outputs: int, inputs: int, element_size: int, *, without_norm: bool, gated: bool
) -> _Launch:
    """Returns the launch parameters for a matrix. Measured on an H200: in whole steps with the
    shapes of Llama-8B and Qwen3-0.6B, and of Qwen3-30B-A3B for 8 bits, and in graphs of matmuls
    (1,024 to 51,200 outputs of 1,024 to 25,600 inputs).

    Args:
        outputs: rows of the matrix; with `gated`, of both halves.
        inputs: columns of the matrix.
        element_size: bytes of a weight.
        without_norm: whether the row is multiplied without a norm.
        gated: whether the matrix is a gated pair.
    """
    whole = round_up_to_power_of_2(inputs)
    if outputs * inputs <= SMALL:
        # With a fused norm, 8 bits count as 16: larger matrices were not measured.
        early = outputs * inputs * (element_size if without_norm else 2) <= _TINY
        rows, columns, warps = _small_matrix_launch(
            outputs, inputs, element_size, without_norm=without_norm
        )
        return _Launch(rows // 2 if gated else rows, columns, warps, prefetch=True, early=early)
    if outputs >= HEAD:
        return _Launch(2, whole, 4) if whole <= 4096 else _Launch(4, 1024, 2)
    if element_size == 1:
        if whole == inputs <= 8192 and (gated or without_norm):
            return _Launch(2, whole, 4, prefetch=True, early=True)
        return _Launch(4, 512, 1 if outputs > 4096 else 4)
    if whole == inputs <= 4096:
        return _Launch(
            1 if without_norm else 2,
            whole,
            max(1, whole // 512),
            prefetch=True,
            early=not without_norm,
        )
    # a whole row in one iteration, with few idle lanes
    if 7168 <= inputs <= 8192 and (gated or without_norm):
        return _Launch(1, whole, 8 if without_norm else 4, prefetch=True, early=True)
    return (
        _Launch(2, 1024, 4, prefetch=True, early=True)
        if without_norm
        else _Launch(2, 512, 2, prefetch=True)
    )


def _small_matrix_launch(
    outputs: int, inputs: int, element_size: int, *, without_norm: bool
) -> tuple[int, int, int]:
    """Returns the outputs, inputs and warps of a program for a small matrix. A whole row is
    prefetched if it fits.
    """
    whole = max(1024, round_up_to_power_of_2(inputs))
    if element_size == 1 and without_norm and 4096 <= whole <= 8192:
        return 16384 // whole, whole, 4
    if inputs >= 4096 and outputs <= 4096:
        return (4, 2048, 4) if without_norm or inputs > 4096 else (4, 4096, 8)
    if inputs >= 4096:
        return 8, 512, 4
    return 8192 // whole, whole, 4


class SmallBatchLinear:
    """Multiplies 2 to MAX_ROWS rows by a weight matrix. Holds a buffer for partial sums that all
    calls on one stream share.

    Args:
        device: device of the tensors.
    """

    BLOCK_N = 64
    SPLITS = 4

    def __init__(self, device: torch.device) -> None:
        tiles = SPLIT_OUTPUTS // self.BLOCK_N
        self._partials = torch.empty(tiles * self.SPLITS * self.BLOCK_N * MAX_ROWS, device=device)
        self._counters = torch.zeros(tiles, dtype=torch.int32, device=device)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Returns x [M, K] times weight [N, K] transposed, plus bias [N], as [M, N]."""
        rows, inputs = x.shape
        outputs = weight.shape[0]
        tiles = cdiv(outputs, self.BLOCK_N)
        # Few tiles would leave multiprocessors idle, so K is split; a short sum is not worth it.
        splits = self.SPLITS if tiles <= len(self._counters) and inputs >= 2048 else 1
        y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
        _small_batch[(tiles, splits)](
            x,
            weight,
            bias,
            y,
            self._partials,
            self._counters,
            rows,
            outputs,
            inputs,
            BIAS=bias is not None,
            SPLITS=splits,
            BLOCK_M=16 if rows <= 16 else MAX_ROWS,
            BLOCK_N=self.BLOCK_N,
            BLOCK_K=128,
            num_warps=4,
            num_stages=4 if x.element_size() < 4 else 2,
            **pdl_options(x.device),
        )
        return y
