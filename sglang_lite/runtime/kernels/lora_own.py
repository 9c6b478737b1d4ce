"""LoRA matmuls for few tokens with many adapters: each token is multiplied by its own adapter's
matrices.

    own_shrink: hidden[s, t, p, r] = sum over k in split s of A[adapter of t][p, r, k] x[t, k]
    own_expand: out[t, n] += sum over r, s of B[adapter of t][r, n] hidden[s, t, part of n, r]

A token whose adapter has rank R reads R (parts * K + N) elements of 2 bytes, and shares none with
another token. This is for steps in which most tokens have adapters of their own: tiles of all
adapters' ranks by all tokens (lora_few.py) would be mostly zeros. Matrix units are not used, as
each matrix is multiplied by one row. Both kernels load their first matrices before they wait for
earlier kernels. `own_shrink` lets the model's own matmul begin as soon as x is available, and
`own_expand` applies the activation of a gated pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.activation import apply_activation
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.lora_few import outputs_of
from sglang_lite.runtime.kernels.lora_weights import RANKS, LoraStep, LoraWeights
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

# adapters of a step from which this is faster than tiles of all ranks; 32 in 32 rows are not
MIN_ADAPTERS = 33
_MAX_TOKENS = 64  # tokens
_TOGETHER = 16  # ranks that a program multiplies together
_BLOCK = 1024  # inputs of a split, or outputs of a program


@dataclass(frozen=True, slots=True)
class OwnRanks:
    """Pages and rank of each token's adapter.

    Attributes:
        pages: int32 [T, longest], pages of each token's adapter.
        ranks: int32 [T], its rank; 0 without one.
    """

    pages: torch.Tensor
    ranks: torch.Tensor


@dataclass(frozen=True, slots=True)
class OwnShrunk:
    """Tokens' inputs after multiplication by A, still to be multiplied by B.

    Attributes:
        hidden: float32 [splits, T, parts, ranks], to be summed over splits; undefined beyond a
            token's rank.
        weights: matrices of the adapters.
        ranks: adapters of the tokens.
    """

    hidden: torch.Tensor
    weights: LoraWeights
    ranks: OwnRanks


def is_own_lora_faster(adapters: int, tokens: int) -> bool:
    """Returns whether these kernels are faster than those of `lora` and `lora_few` for this many
    different adapters and tokens.
    """
    return adapters >= MIN_ADAPTERS and tokens <= _MAX_TOKENS


@cached_launch
@triton.jit
def _own_ranks(
    of_slot,
    slots,
    pages,
    ranks,
    own_pages,
    own_ranks,
    ADAPTERS: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    token, page = tl.program_id(0), tl.arange(0, BLOCK)
    adapter = tl.load(of_slot + tl.load(slots + token))
    valid = (adapter >= 0) & (adapter < ADAPTERS)
    tl.store(own_ranks + token, tl.load(ranks + adapter, mask=valid, other=0))
    number = tl.load(pages + tl.where(valid, adapter, 0) * PAGES + page, mask=page < PAGES, other=0)
    tl.store(own_pages + token * PAGES + page, number, mask=page < PAGES)


def own_ranks(step: LoraStep, slots: torch.Tensor) -> OwnRanks:
    """Looks up the adapter of each token. Must be called before the step's first kernel that
    overlaps with others, like `join_ranks`.

    Args:
        step: adapters of the step.
        slots: [T], slot of each token.
    """
    adapters, longest = step.pages.shape
    found = OwnRanks(step.pages.new_empty((len(slots), longest)), step.ranks.new_empty(len(slots)))
    _own_ranks[(len(slots),)](
        step.of_slot,
        slots,
        step.pages,
        step.ranks,
        found.pages,
        found.ranks,
        ADAPTERS=adapters,
        PAGES=longest,
        BLOCK=round_up_to_power_of_2(longest),
        num_warps=1,
        **pdl_options(slots.device),
    )
    return found


@triton.jit
def _rows(pages, token, first, PAGES: tl.constexpr, RANKS: tl.constexpr, TOGETHER: tl.constexpr):
    """Returns ranks [TOGETHER] of a token's adapter from `first` on, and their pages."""
    r = first + tl.arange(0, TOGETHER)
    return r, tl.load(pages + token * PAGES + r // RANKS, mask=r < PAGES * RANKS, other=0).to(
        tl.int64
    )


@cached_launch
@triton.jit(do_not_specialize=["T"])
def _own_shrink(
    x,
    a,
    hidden,
    pages,
    ranks,
    T,
    K,
    PAGE,
    PAGES: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    split, part, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rank, k = tl.load(ranks + token), split * BLOCK + tl.arange(0, BLOCK)
    r, page = _rows(pages, token, 0, PAGES, RANKS, TOGETHER)
    rows = a + page * PAGE + (part * RANKS + r % RANKS) * K
    weights = tl.load(
        rows[:, None] + k[None, :], mask=(r < rank)[:, None] & (k < K)[None, :], other=0.0
    )
    wait(PDL)
    start_next(PDL)  # not earlier, as the next kernel may read x without waiting
    values = tl.load(x + token * K + k, mask=k < K, other=0.0).to(tl.float32)
    out = hidden + ((split * T + token) * PARTS + part) * (PAGES * RANKS)
    tl.store(out + r, tl.sum(weights.to(tl.float32) * values[None, :], 1), mask=r < rank)
    for first in range(TOGETHER, rank, TOGETHER):
        r, page = _rows(pages, token, first, PAGES, RANKS, TOGETHER)
        rows = a + page * PAGE + (part * RANKS + r % RANKS) * K
        weights = tl.load(
            rows[:, None] + k[None, :], mask=(r < rank)[:, None] & (k < K)[None, :], other=0.0
        )
        tl.store(out + r, tl.sum(weights.to(tl.float32) * values[None, :], 1), mask=r < rank)


def own_shrink(x: torch.Tensor, weights: LoraWeights, ranks: OwnRanks) -> OwnShrunk:
    """Multiplies each token's inputs by its adapter's A. The next kernel may start before this one
    has finished, but not before x is available.

    Args:
        x: [T, inputs], contiguous.
        weights: adapters' matrices of a product.
        ranks: adapters of the tokens.
    """
    (tokens, inputs), parts, longest = x.shape, len(weights.outputs), ranks.pages.shape[1]
    splits = cdiv(inputs, _BLOCK)
    hidden = torch.empty(
        (splits, tokens, parts, longest * RANKS), dtype=torch.float32, device=x.device
    )
    _own_shrink[(splits, parts, tokens)](
        x,
        weights.a,
        hidden,
        ranks.pages,
        ranks.ranks,
        tokens,
        inputs,
        weights.page_size,
        PAGES=longest,
        RANKS=RANKS,
        PARTS=parts,
        TOGETHER=_TOGETHER,
        BLOCK=_BLOCK,
        num_warps=4,
        **pdl_options(x.device),
    )
    return OwnShrunk(hidden, weights, ranks)


@triton.jit
def _sums(
    hidden,
    token,
    part,
    r,
    rank,
    T,
    WIDTH,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Loads a token's hidden row of ranks r, the sum of its splits."""
    split = tl.arange(0, BLOCK_S)
    at = hidden + ((split * T + token) * PARTS + part) * WIDTH
    return tl.sum(
        tl.load(
            at[:, None] + r[None, :],
            mask=(split < SPLITS)[:, None] & (r < rank)[None, :],
            other=0.0,
        ),
        0,
    )


@cached_launch
@triton.jit(do_not_specialize=["T"])
def _own_expand(
    hidden,
    b,
    product,
    out,
    pages,
    ranks,
    T,
    N,
    PAGE,
    END0,
    END1,
    END2,
    END3,
    END4,
    PAGES: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    GATE: tl.constexpr,
    TOGETHER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    token, COLUMNS = tl.program_id(1), N if GATE == "" else 2 * N
    if GATE == "":
        part, n, end = outputs_of(tl.program_id(0), N, END0, END1, END2, END3, END4, PARTS, BLOCK)
    else:
        part, n, end = 0, tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), N
    rank = tl.load(ranks + token)
    r, page = _rows(pages, token, 0, PAGES, RANKS, TOGETHER)
    rows, valid = b + page * PAGE + r % RANKS * COLUMNS, (r < rank)[:, None] & (n < end)[None, :]
    weights = tl.load(rows[:, None] + n[None, :], mask=valid, other=0.0)
    if GATE != "":
        up_weights = tl.load(rows[:, None] + (N + n)[None, :], mask=valid, other=0.0)
    wait(PDL)
    acc = tl.load(product + token * COLUMNS + n, mask=n < end, other=0.0).to(tl.float32)
    low = _sums(hidden, token, part, r, rank, T, PAGES * RANKS, PARTS, SPLITS, BLOCK_S)
    acc += tl.sum(weights.to(tl.float32) * low[:, None], 0)
    if GATE != "":
        up = tl.load(product + token * COLUMNS + N + n, mask=n < end, other=0.0).to(tl.float32)
        low = _sums(hidden, token, 1, r, rank, T, PAGES * RANKS, PARTS, SPLITS, BLOCK_S)
        up += tl.sum(up_weights.to(tl.float32) * low[:, None], 0)
    for first in range(TOGETHER, rank, TOGETHER):
        r, page = _rows(pages, token, first, PAGES, RANKS, TOGETHER)
        rows, valid = (
            b + page * PAGE + r % RANKS * COLUMNS,
            (r < rank)[:, None] & (n < end)[None, :],
        )
        weights = tl.load(rows[:, None] + n[None, :], mask=valid, other=0.0)
        low = _sums(hidden, token, part, r, rank, T, PAGES * RANKS, PARTS, SPLITS, BLOCK_S)
        acc += tl.sum(weights.to(tl.float32) * low[:, None], 0)
        if GATE != "":
            weights = tl.load(rows[:, None] + (N + n)[None, :], mask=valid, other=0.0)
            low = _sums(hidden, token, 1, r, rank, T, PAGES * RANKS, PARTS, SPLITS, BLOCK_S)
            up += tl.sum(weights.to(tl.float32) * low[:, None], 0)
    type = out.dtype.element_ty
    if GATE != "":  # rounded as separate operations would
        gate = apply_activation(acc.to(type).to(tl.float32), GATE).to(type).to(tl.float32)
        acc = gate * up.to(type).to(tl.float32)
    tl.store(out + token * N + n, acc.to(type), mask=n < end)


def own_expand(shrunk: OwnShrunk, product: torch.Tensor, activation: str = "") -> torch.Tensor:
    """Adds shrunk inputs times B to the output [T, outputs] of a linear layer in place, and returns
    the output. With an activation, the output is [T, 2 N], gates first, and the result is a new
    tensor act(gate) * up [T, N] of the sum.

    Args:
        shrunk: shrunk inputs of the product.
        product: contiguous; without an activation it may have more precise numbers than the inputs.
        activation: "silu", "gelu", "gelu_tanh", or "" for none.
    """
    (splits, tokens, parts, _), weights, ranks = shrunk.hidden.shape, shrunk.weights, shrunk.ranks
    block = _BLOCK // 2 if activation else _BLOCK
    outputs = weights.outputs[:1] if activation else weights.outputs
    out = product.new_empty((tokens, outputs[0])) if activation else product
    _own_expand[(sum(cdiv(each, block) for each in outputs), tokens)](
        shrunk.hidden,
        weights.b,
        product,
        out,
        ranks.pages,
        ranks.ranks,
        tokens,
        out.shape[1],
        weights.page_size,
        *weights.ends,
        PAGES=ranks.pages.shape[1],
        RANKS=RANKS,
        PARTS=parts,
        SPLITS=splits,
        GATE=activation,
        TOGETHER=_TOGETHER,
        BLOCK=block,
        BLOCK_S=round_up_to_power_of_2(splits),
        num_warps=4,
        **pdl_options(product.device),
    )
    return out
