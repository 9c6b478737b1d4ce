"""Multiplies a few tokens by the 4-bit matrices of their experts, one token-expert pair at a time.
Reading the weights takes most of the time.

    hidden[t, j] = act(gate[e] x[t]) * (up[e] x[t])         e = ids[t, j], the token's j-th expert
    out[t] = base[t] + sum over j of weights[t, j] * (down[e] hidden[t, j])

Numbers are decoded and multiplied in the same way as for a single row (packed_row.py), with the
quads of words of a token's experts one after the other. Moves N K / 2 bytes of each chosen matrix
[N, K], and its scales.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.activation import gated_pair
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.packed_products import count_column_blocks, weight_kernel_constants
from sglang_lite.runtime.kernels.packed_row import count_word_quads, row_inputs, row_sums
from sglang_lite.runtime.kernels.packed_weight import SLICES, PackedWeight
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2


@cached_launch
@triton.jit
def _gate_up(
    x,
    ids,
    words,
    scales,
    bias,
    out,
    rows,
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
    WORDS: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUADS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    OUTPUTS: tl.constexpr = BLOCK_N // 2
    pair = tl.program_id(0)
    quad, word, row = tl.arange(0, QUADS), tl.arange(0, QUADS * 4), tl.arange(0, BLOCK_N)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    n = tl.program_id(1) * OUTPUTS + row % OUTPUTS
    if N % OUTPUTS > 0:
        n = tl.minimum(n, N - 1)  # what is too much is not stored
    n += tl.load(ids + pair) * (2 * N) + row // OUTPUTS * N  # gates, then as many ups
    place = words + n.to(tl.int64)[:, None] * WORDS + word[None, :]
    packed = tl.load(place, mask=(word < WORDS)[None, :], other=0, eviction_policy="evict_first")
    own = x + (pair // TOP).to(tl.int64) * K
    inputs = row_inputs(own, own, own, own, quad, K, SLICE, KIND, False, False)
    mask = (quad < WORDS // 4)[:, None] & (row >= 0)[None, :]
    acc = row_sums(
        packed, scales, quad, mask, n, rows, inputs, KIND, ZERO, HALF, SLICE, GROUP, TOGETHER
    )
    start_next(PDL)  # not earlier: waiting programs would block those yet to start
    result = tl.sum(acc, 1) * 2.0**64
    if BIAS:
        result += tl.load(bias + n).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(result, (2, OUTPUTS)), (1, 0)))
    result = gated_pair(gate, up, alpha, limit, ACTIVATION)
    tl.store(
        out + pair.to(tl.int64) * N + outputs, result.to(out.dtype.element_ty), mask=outputs < N
    )


@cached_launch
@triton.jit
def _down(
    hidden,
    ids,
    weights,
    words,
    scales,
    bias,
    base,
    out,
    rows,
    TOP: tl.constexpr,
    K: tl.constexpr,
    N: tl.constexpr,
    KIND: tl.constexpr,
    ZERO: tl.constexpr,
    HALF: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    TOGETHER: tl.constexpr,
    WORDS: tl.constexpr,
    BIAS: tl.constexpr,
    BASE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    QUADS: tl.constexpr,
    TOPS: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = n
    if N % BLOCK_N > 0:
        row = tl.minimum(n, N - 1)  # what is too much is not stored
    # The ids are older than the previous kernel, and no kernel writes weights, so these are loaded
    # before the wait.
    member, word = tl.arange(0, TOPS), tl.arange(0, QUADS * 4)
    expert = tl.load(ids + token * TOP + member, mask=member < TOP, other=0)
    place = (expert[None, :] * N + row[:, None]).to(tl.int64)[:, :, None] * WORDS + word[
        None, None, :
    ]
    mask = ((member < TOP)[:, None] & (word < WORDS)[None, :])[None, :, :]
    packed = tl.load(words + place, mask=mask, other=0, eviction_policy="evict_first")
    wait(PDL)
    at = tl.arange(0, TOPS * QUADS)
    quad, pair = at % QUADS, token * TOP + tl.minimum(at // QUADS, TOP - 1)
    own = hidden + pair.to(tl.int64)[:, None] * K
    inputs = row_inputs(own, own, own, own, quad, K, SLICE, KIND, False, False)
    mask = ((at // QUADS < TOP) & (quad < WORDS // 4))[:, None] & (row >= 0)[None, :]
    acc = row_sums(
        tl.reshape(packed, (BLOCK_N, TOPS * QUADS * 4)),
        scales + (tl.load(ids + pair) * N)[:, None],
        quad,
        mask,
        row,
        rows,
        inputs,
        KIND,
        ZERO,
        HALF,
        SLICE,
        GROUP,
        TOGETHER,
    )
    start_next(PDL)
    total = tl.sum(acc * tl.load(weights + pair)[None, :], 1) * 2.0**64
    if BIAS:
        share = tl.load(weights + token * TOP + member, mask=member < TOP, other=0.0)
        biases = tl.load(bias + expert[:, None] * N + row[None, :]).to(tl.float32)
        total += tl.sum(biases * share[:, None], 0)
    if BASE:
        total += tl.load(base + token.to(tl.int64) * N + row).to(tl.float32)
    tl.store(out + token.to(tl.int64) * N + n, total.to(out.dtype.element_ty), mask=n < N)


def packed_gate_up_few(
    x: torch.Tensor,
    weight: PackedWeight,
    experts: int,
    ids: torch.Tensor,
    activation: str,
    *,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> torch.Tensor:
    """Returns act(gate) * up of each token for each of its experts.

    Args:
        x: [T, K], contiguous.
        weight: [E * 2 N, K], each expert's gates before its ups; without a table.
        experts: number of experts, E.
        ids: int32 [T, top], contiguous.
        activation: "silu", "gelu", "gelu_tanh" or "clamped".
        bias: [E, 2 N] or None.
        alpha, limit: parameters of "clamped".

    Returns:
        [T * top, N], by pair.
    """
    pairs = ids.numel()
    outputs = len(weight.words) // (2 * experts)
    quads = count_word_quads(weight)
    out = x.new_empty((pairs, outputs))
    # gates and ups of a program; of nine launches the fastest with the sizes of `_down_launch`
    rows = 8
    _gate_up[(pairs, cdiv(outputs, rows // 2))](
        x,
        ids,
        weight.words,
        weight.scales,
        bias,
        out,
        len(weight.words),
        alpha,
        limit,
        TOP=ids.shape[1],
        K=weight.inputs,
        N=outputs,
        **_matrix_constants(weight),
        BIAS=bias is not None,
        ACTIVATION=activation,
        BLOCK_N=rows,
        QUADS=quads,
        num_warps=max(1, min(16, quads // 64)),
        **pdl_options(x.device),
    )
    return out


def packed_down_few(
    hidden: torch.Tensor,
    weight: PackedWeight,
    experts: int,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns each token's weighted sum of its experts' outputs.

    Args:
        hidden: [T * top, K], contiguous, by pair.
        weight: [E * N, K], without a table.
        experts: number of experts, E.
        ids, weights: int32 and float32 [T, top], contiguous; ids must not come from the kernel
            launched just before.
        bias: [E, N] or None.
        base: [T, N], contiguous, added to the sum, or None.

    Returns:
        [T, N].
    """
    (tokens, top), outputs, quads = (
        ids.shape,
        len(weight.words) // experts,
        count_word_quads(weight),
    )
    out = hidden.new_empty((tokens, outputs))
    tops = round_up_to_power_of_2(top)
    rows, warps = _down_launch(tops * quads)
    _down[(tokens, cdiv(outputs, rows))](
        hidden,
        ids,
        weights,
        weight.words,
        weight.scales,
        bias,
        base,
        out,
        len(weight.words),
        TOP=top,
        K=weight.inputs,
        N=outputs,
        **_matrix_constants(weight),
        BIAS=bias is not None,
        BASE=base is not None,
        BLOCK_N=rows,
        QUADS=quads,
        TOPS=tops,
        num_warps=warps,
        **pdl_options(hidden.device),
    )
    return out


def _down_launch(quads: int) -> tuple[int, int]:
    """Returns BLOCK_N and warps of `_down`. `quads` is the number of groups of four words that a
    token's experts have together, with one matrix row from each.

    The values were the fastest of twelve on an H200 with the sizes of Qwen3-30B-A3B and
    Qwen3-235B-A22B (few quads) and of Mixtral-8x7B (many).
    """
    return (2, max(1, quads // 256)) if quads <= 512 else (4, min(16, quads // 64))


def _matrix_constants(weight: PackedWeight) -> dict[str, object]:
    """Returns the kernel constants that depend only on the matrix."""
    assert weight.table is None
    return {
        **weight_kernel_constants(weight),
        "TOGETHER": math.gcd(weight.group // weight.slice, SLICES),
        "WORDS": count_column_blocks(weight) * weight.slice // 2,
    }
