"""Multiplies a few tokens by the matrices of their experts, one token-expert pair at a time.
Reading the weights takes most of the time.

    hidden[t, j] = act(gate[e] x[t]) * (up[e] x[t])         e = ids[t, j], the token's j-th expert
    out[t] = base[t] + sum over j of weights[t, j] * (down[e] hidden[t, j])

A pair is token * top + j, as in `experts_order`. Programs of tokens that chose the same expert run
next to each other, so most of its weights are read from memory once. Sums are in float32 and always
in the same order. Experts that another rank holds have the number E and count as zeros; nothing is
read for them.

Weights may be in 8 bits (e4m3) with a scale for each block of 128 by 128.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.activation import gated_pair
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

SCALED_BLOCK = 128  # rows and columns of 8-bit weights that share a scale


@triton.jit
def _weights(at, valid, inside, WHOLE: tl.constexpr):
    """Loads weights [N, K] as float32, marked for early eviction, as no other program reads them
    soon.
    """
    if WHOLE:
        matrix = tl.load(at, eviction_policy="evict_first")
    else:
        matrix = tl.load(
            at, mask=valid[:, None] & inside[None, :], other=0.0, eviction_policy="evict_first"
        )
    return matrix.to(tl.float32)


@triton.jit
def _inside(at, END: tl.constexpr, expert, EXPERTS: tl.constexpr):
    """Returns a mask of the indices `at` below END. With EXPERTS, the mask is all false for an
    expert whose number is EXPERTS or more.
    """
    if EXPERTS:
        return at < tl.where(expert < EXPERTS, END, 0)
    else:
        return at < END


@triton.jit
def _runs(matrix, value, RUN: tl.constexpr):
    """Sums products [N, K] over runs of RUN columns: [N, K / RUN]. With 8-bit weights, a run of 16
    lies in one thread, so the sums over experts and columns take few registers.
    """
    products = matrix * value[None, :]
    return tl.sum(tl.reshape(products, [products.shape[0], products.shape[1] // RUN, RUN]), 2)


@cached_launch
@triton.jit
def _gate_up(
    x,
    ids,
    w,
    scales,
    bias,
    out,
    alpha,
    limit,
    TOP: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    KIND: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    pair = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    whole: tl.constexpr = N % BLOCK_N == 0 and EXPERTS == 0
    run: tl.constexpr = 16 if SCALED else 1
    runs = tl.arange(0, BLOCK_K // run) * run
    expert = tl.load(ids + pair).to(tl.int64)
    gates = w + expert * (2 * N * K) + n[:, None] * K + k[None, :]
    row = x + (pair // TOP).to(tl.int64) * K
    gate = tl.zeros((BLOCK_N, BLOCK_K // run), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K // run), tl.float32)
    for at in tl.static_range(0, K, BLOCK_K):
        inside = _inside(at + k, K, expert, EXPERTS)
        gate_weights = _weights(gates + at, n < N, inside, whole and at + BLOCK_K <= K)
        up_weights = _weights(gates + (N * K + at), n < N, inside, whole and at + BLOCK_K <= K)
        value = tl.load(row + at + k, mask=inside, other=0.0).to(tl.float32)
        gate_sums = _runs(gate_weights, value, run)
        up_sums = _runs(up_weights, value, run)
        if SCALED:  # a program's outputs are in one row of blocks
            first = tl.program_id(1) * BLOCK_N
            own = scales + expert * ((2 * N // 128) * (K // 128)) + (at + runs) // 128
            here = _inside(at + runs, K, expert, EXPERTS)
            gate_sums *= tl.load(own + first // 128 * (K // 128), mask=here, other=0.0)[None, :]
            up_sums *= tl.load(own + (N + first) // 128 * (K // 128), mask=here, other=0.0)[None, :]
        gate += gate_sums
        up += up_sums
    start_next(PDL)  # not earlier: waiting programs would block those yet to start
    gates = tl.sum(gate, 1)
    ups = tl.sum(up, 1)
    if BIAS:
        valid = _inside(n, N, expert, EXPERTS)
        gates += tl.load(bias + expert * (2 * N) + n, mask=valid, other=0.0).to(tl.float32)
        ups += tl.load(bias + expert * (2 * N) + N + n, mask=valid, other=0.0).to(tl.float32)
    result = gated_pair(gates, ups, alpha, limit, KIND)
    tl.store(out + pair.to(tl.int64) * N + n, result.to(out.dtype.element_ty), mask=n < N)


@cached_launch
@triton.jit
def _down(
    hidden,
    ids,
    weights,
    w,
    scales,
    bias,
    base,
    out,
    TOP: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    BASE: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    whole: tl.constexpr = N % BLOCK_N == 0 and EXPERTS == 0
    run: tl.constexpr = 16 if SCALED else 1
    runs = tl.arange(0, BLOCK_K // run) * run
    # The ids are older than the previous kernel, and no kernel writes weights, so the first weights
    # are loaded before the wait.
    first = tl.load(ids + token * TOP).to(tl.int64)
    rows = w + first * (N * K) + n[:, None] * K + k[None, :]
    matrix = _weights(rows, n < N, _inside(k, K, first, EXPERTS), whole and BLOCK_K <= K)
    wait(PDL)
    acc = tl.zeros((BLOCK_N, BLOCK_K // run), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    if BASE:
        total += tl.load(base + token * N + n, mask=n < N, other=0.0).to(tl.float32)
    for j in tl.static_range(TOP):
        pair = token * TOP + j
        expert = tl.load(ids + pair).to(tl.int64)
        weight = tl.load(weights + pair)
        rows = w + expert * (N * K) + n[:, None] * K + k[None, :]
        for at in tl.static_range(0, K, BLOCK_K):
            inside = _inside(at + k, K, expert, EXPERTS)
            if j > 0 or at > 0:
                matrix = _weights(rows + at, n < N, inside, whole and at + BLOCK_K <= K)
            value = tl.load(hidden + pair * K + at + k, mask=inside, other=0.0).to(tl.float32)
            sums = _runs(matrix, value, run) * weight
            if SCALED:
                own = scales + (expert * (N // 128) + tl.program_id(1) * BLOCK_N // 128) * (
                    K // 128
                )
                here = _inside(at + runs, K, expert, EXPERTS)
                sums *= tl.load(own + (at + runs) // 128, mask=here, other=0.0)[None, :]
            acc += sums
        if BIAS:
            own_bias = tl.load(
                bias + expert * N + n, mask=_inside(n, N, expert, EXPERTS), other=0.0
            )
            total += weight * own_bias.to(tl.float32)
    start_next(PDL)
    total += tl.sum(acc, 1)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)


def experts_gate_up_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float = 0.0,
    partial: bool = False,
) -> torch.Tensor:
    """Returns act(gate) * up of each token for each of its experts. Reads 2 N K elements of weights
    for each chosen expert.

    Args:
        x: [T, K], contiguous.
        weight: [E, 2 N, K], gates first.
        ids: int32 [T, top], contiguous.
        activation: "silu", "gelu", "gelu_tanh" or "clamped".
        scales: float32 [E, 2 N / 128, K / 128] for 8-bit weights, else None.
        bias: [E, 2 N] or None.
        alpha, limit: parameters of "clamped".
        partial: whether ids may be E, for an expert that another rank has.

    Returns:
        [T * top, N], by pair.
    """
    pairs = ids.numel()
    outputs = weight.shape[1] // 2
    inputs = weight.shape[2]
    out = torch.empty((pairs, outputs), dtype=x.dtype, device=x.device)
    block_n, block_k, warps = _gate_up_launch(weight)
    _gate_up[(pairs, cdiv(outputs, block_n))](
        x,
        ids,
        weight,
        scales,
        bias,
        out,
        alpha,
        limit,
        TOP=ids.shape[1],
        K=inputs,
        N=outputs,
        SCALED=scales is not None,
        BIAS=bias is not None,
        KIND=activation,
        EXPERTS=len(weight) if partial else 0,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        **pdl_options(x.device),
    )
    return out


def experts_down_few(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    partial: bool = False,
) -> torch.Tensor:
    """Returns each token's weighted sum of its experts' outputs. Reads N K elements of weights for
    each chosen expert.

    Args:
        hidden: [T * top, K], contiguous, by pair.
        weight: [E, N, K].
        ids, weights: int32 and float32 [T, top], contiguous; ids must not come from the kernel
            launched just before.
        scales: float32 [E, N / 128, K / 128] for 8-bit weights, else None.
        bias: [E, N] or None.
        base: [T, N], contiguous, added to the sum, or None.
        partial: as for `experts_gate_up_few`.

    Returns:
        [T, N].
    """
    tokens = len(ids)
    outputs = weight.shape[1]
    inputs = weight.shape[2]
    out = torch.empty((tokens, outputs), dtype=hidden.dtype, device=hidden.device)
    block_n, block_k, warps = _down_launch(weight)
    _down[(tokens, cdiv(outputs, block_n))](
        hidden,
        ids,
        weights,
        weight,
        scales,
        bias,
        base,
        out,
        TOP=ids.shape[1],
        K=inputs,
        N=outputs,
        SCALED=scales is not None,
        BIAS=bias is not None,
        BASE=base is not None,
        EXPERTS=len(weight) if partial else 0,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=warps,
        **pdl_options(hidden.device),
    )
    return out


def _gate_up_launch(weight: torch.Tensor) -> tuple[int, int, int]:
    """Returns BLOCK_N, BLOCK_K and warps of `_gate_up`. Measured on an H200 with the shapes of
    Qwen3-30B-A3B and Qwen3-235B-A22B, each also sharded over two and four ranks, and of
    Mixtral-8x7B.
    """
    columns = round_up_to_power_of_2(weight.shape[2])
    if weight.element_size() == 1:
        return 4, min(512, columns), 2
    return (4, min(1024, columns), 2) if columns <= 2048 else (2, 2048, 4)


def _down_launch(weight: torch.Tensor) -> tuple[int, int, int]:
    """Returns the same launch parameters as `_gate_up_launch`, for `_down`."""
    columns = min(1024, round_up_to_power_of_2(weight.shape[2]))
    if weight.element_size() == 1:
        return (4, columns, 2) if columns == 1024 else (2, columns, 1)
    return 4, columns, max(columns // 256, 1)
