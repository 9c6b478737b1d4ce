"""Multiplies tokens by the LoRA matrices of their adapters, and adds the results to the outputs of
the model's own linear layers. The tokens of a batch may have different adapters.

    hidden[t, p] = A[adapter of t, p] x[t]                 shrink: for each part p of the outputs
    out[t, n] += B[adapter of t, n] hidden[t, part of n]   expand

Tokens are sorted by adapter once per step (`experts_order`), so a program reads an adapter's matrix
for a whole block of its tokens. Few tokens have few blocks, so their sums over inputs are split
among programs; the readers add the partial sums up, always in the same order. Only the device knows
how many blocks there are. So the work is divided among as many programs as can run concurrently.
Each processes consecutive items, and loads the weights of the next item before it computes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.activation import apply_activation
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.experts_order import ExpertBlocks, experts_order
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.lora_few import outputs_of
from sglang_lite.runtime.kernels.lora_weights import RANKS, LoraStep, LoraWeights
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

_FEW = 256  # most tokens in blocks of the smaller size
# tokens of a block
_SMALL = 16
_LARGE = 64
_BLOCK_K = 256
_LONG_BLOCK_K = 128
_BLOCK_N = 128
_SPLIT = 512  # minimum number of inputs of a split
_MAX_SPLITS = 16
_TOGETHER = 16  # ranks that are multiplied together: matrix units take no fewer
# programs that a multiprocessor runs concurrently
_SHRINKING = 6
_EXPANDING = 4


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Tokens of a step, sorted by adapter.

    Attributes:
        blocks: blocks of tokens, one adapter per block; blocks without an adapter come last.
        pages: int32 [blocks, longest], pages of each block's adapter.
        ranks: int32 [blocks], rank of each block's adapter; 0 without one.
        used: int32 [2], number of blocks with an adapter, and total number of blocks with tokens.
    """

    blocks: ExpertBlocks
    pages: torch.Tensor
    ranks: torch.Tensor
    used: torch.Tensor


@cached_launch
@triton.jit
def _describe(
    adapters,
    pages,
    ranks,
    block_pages,
    block_ranks,
    used,
    blocks,
    ADAPTERS: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGES_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    block, page = tl.program_id(0), tl.arange(0, PAGES_BLOCK)
    adapter = tl.load(adapters + block)
    own_rank, own = 0, tl.zeros((PAGES_BLOCK,), tl.int32)
    if (adapter >= 0) & (adapter < ADAPTERS):
        own_rank = tl.load(ranks + adapter)
        own = tl.load(pages + adapter * PAGES + page, mask=page < PAGES, other=0)
    tl.store(block_ranks + block, own_rank)
    tl.store(block_pages + block * PAGES + page, own, mask=page < PAGES)
    if block == 0:
        adapted, all = 0, 0
        for at in range(0, blocks, BLOCK):
            of = at + tl.arange(0, BLOCK)
            each = tl.load(adapters + of, mask=of < blocks, other=-1)
            adapted += tl.sum(((each >= 0) & (each < ADAPTERS)).to(tl.int32))
            all += tl.sum((each >= 0).to(tl.int32))
        tl.store(used, adapted)
        tl.store(used + 1, all)


def lora_rows(step: LoraStep, slots: torch.Tensor) -> LoraRows:
    """Returns the tokens of a step, sorted by adapter. Must be called before the step's first
    kernel that overlaps with others.

    The LoRA kernels may then read the result without waiting for the kernels before them.

    Args:
        step: adapters of the step.
        slots: int32 [T], slot of each token.
    """
    adapters = len(step.ranks)
    longest = step.pages.shape[1]
    blocks = experts_order(
        step.of_slot[slots].unsqueeze(1), adapters + 1, _SMALL if len(slots) <= _FEW else _LARGE
    )
    count = len(blocks.experts)
    pages, ranks = (blocks.experts.new_empty(shape) for shape in ((count, longest), (count,)))
    used = blocks.experts.new_empty(2)
    _describe[(count,)](
        blocks.experts,
        step.pages,
        step.ranks,
        pages,
        ranks,
        used,
        count,
        ADAPTERS=adapters,
        PAGES=longest,
        BLOCK=256,
        PAGES_BLOCK=round_up_to_power_of_2(longest),
        num_warps=1,
        **pdl_options(slots.device),
    )
    return LoraRows(blocks, pages, ranks, used)


@triton.jit
def _range(total):
    """Returns the first of a program's items, and their end. They are consecutive, so that most
    belong to the same block.
    """
    count = tl.cdiv(total, tl.num_programs(0))
    first = tl.program_id(0) * count
    return first, tl.minimum(first + count, total)


@triton.jit
def _block(
    tokens,
    ranks,
    pages,
    block,
    valid,
    T,
    PAGES: tl.constexpr,
    RANKS: tl.constexpr,
    SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Returns a block's rank, the pages of its first ranks [TOGETHER], its tokens [SIZE], and
    whether it has only one token. The rank is 0 if the block is not valid.
    """
    size = tl.where(valid, SIZE, 0)
    of = tl.arange(0, SIZE)
    own = tl.load(tokens + block * SIZE + of, mask=of < size, other=0).to(tl.int64)
    alone = tl.load(tokens + block * SIZE + 1, mask=valid, other=0) >= T
    rank = tl.load(ranks + block, mask=valid, other=0)
    return rank, _pages(pages, block, 0, rank, PAGES, RANKS, TOGETHER), own, alone


@triton.jit
def _pages(
    pages, block, first, rank, PAGES: tl.constexpr, RANKS: tl.constexpr, TOGETHER: tl.constexpr
):
    """Returns the pages [TOGETHER] of the ranks of a block's adapter from `first` on."""
    r = first + tl.arange(0, TOGETHER)
    return tl.load(pages + block * PAGES + r // RANKS, mask=r < rank, other=0).to(tl.int64)


@triton.jit
def _load_a(a, first, page, rank, part, k, K, PAGE, RANKS: tl.constexpr):
    """Loads A [TOGETHER, BLOCK_K] of the ranks from `first` on, in these pages, and of inputs k."""
    r = first + tl.arange(0, page.shape[0])
    matrix = a + page * PAGE + (part * RANKS + r % RANKS) * K
    return tl.load(
        matrix[:, None] + k[None, :], mask=(r < rank)[:, None] & (k < K)[None, :], other=0.0
    )


@cached_launch
@triton.jit(do_not_specialize=["T"])
def _shrink(
    x,
    a,
    hidden,
    tokens,
    pages,
    ranks,
    used,
    T,
    K,
    PAGE,
    PAGES: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    begin, end = _range(tl.load(used) * (PARTS * SPLITS))
    block, k = begin // (PARTS * SPLITS), tl.arange(0, BLOCK_K)
    rank, page, token, _ = _block(
        tokens, ranks, pages, block, begin < end, T, PAGES, RANKS, SIZE, TOGETHER
    )
    weights = _load_a(
        a, 0, page, rank, begin // SPLITS % PARTS, begin % SPLITS * BLOCK_K + k, K, PAGE, RANKS
    )
    wait(PDL)
    for item in range(begin, end):
        part, split = item // SPLITS % PARTS, item % SPLITS
        rows = x + token * K
        own = (token * PARTS + part) * (PAGES * RANKS)
        of = page
        for first in range(0, rank, TOGETHER):
            if first > 0:
                of = _pages(pages, block, first, rank, PAGES, RANKS, TOGETHER)
                weights = _load_a(a, first, of, rank, part, split * BLOCK_K + k, K, PAGE, RANKS)
            r = first + tl.arange(0, TOGETHER)
            acc = tl.zeros((TOGETHER, SIZE), tl.float32)
            for at in range(split * BLOCK_K, K, BLOCK_K * SPLITS):
                inside = (token < T)[None, :] & (at + k < K)[:, None]
                values = tl.load(rows[None, :] + (at + k)[:, None], mask=inside, other=0.0)
                acc = tl.dot(weights, values, acc, input_precision="ieee")
                weights = _load_a(
                    a, first, of, rank, part, at + BLOCK_K * SPLITS + k, K, PAGE, RANKS
                )
            at, valid = own[None, :] + r[:, None], (r < rank)[:, None] & (token < T)[None, :]
            tl.store(hidden + split * T * (PARTS * PAGES * RANKS) + at, acc, mask=valid)
        later = item + 1
        if later // (PARTS * SPLITS) != block:
            block = later // (PARTS * SPLITS)
            rank, page, token, _ = _block(
                tokens, ranks, pages, block, later < end, T, PAGES, RANKS, SIZE, TOGETHER
            )
        left = tl.where(later < end, rank, 0)
        weights = _load_a(
            a, 0, page, left, later // SPLITS % PARTS, later % SPLITS * BLOCK_K + k, K, PAGE, RANKS
        )


@triton.jit
def _load_b(b, first, page, rank, n, end, N, PAGE, RANKS: tl.constexpr):
    """Loads B [TOGETHER, BLOCK_N] of the ranks from `first` on, in these pages, and outputs n of N."""
    r = first + tl.arange(0, page.shape[0])
    matrix = b + page * PAGE + r % RANKS * N
    return tl.load(
        matrix[:, None] + n[None, :], mask=(r < rank)[:, None] & (n < end)[None, :], other=0.0
    )


@triton.jit
def _hidden(
    hidden,
    token,
    alone,
    part,
    first,
    rank,
    T,
    PAGES: tl.constexpr,
    RANKS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Loads the hidden rows [SIZE, TOGETHER] of a block's tokens, for the ranks from `first` on. If
    the block has only one token, as most blocks do in a batch with many adapters, all rows are that
    token's.
    """
    r, size = first + tl.arange(0, TOGETHER), PARTS * PAGES * RANKS
    values = tl.zeros((token.shape[0], TOGETHER), tl.float32)
    if alone:
        one = (
            tl.min(token) * size + part * (PAGES * RANKS) + tl.arange(0, SPLITS)[:, None] * T * size
        )
        own = tl.load(hidden + one + r[None, :], mask=(r < rank)[None, :], other=0.0)
        values += tl.sum(own, 0)[None, :]
    else:
        rows = hidden + token * size + part * (PAGES * RANKS)
        valid = (token < T)[:, None] & (r < rank)[None, :]
        for split in tl.static_range(SPLITS):
            values += tl.load(rows[:, None] + split * T * size + r[None, :], mask=valid, other=0.0)
    return values


@cached_launch
@triton.jit(do_not_specialize=["T"])
def _expand(
    hidden,
    b,
    out,
    tokens,
    pages,
    ranks,
    used,
    T,
    N,
    PAGE,
    END0,
    END1,
    END2,
    END3,
    END4,
    TILES,
    PAGES: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    begin, stop = _range(tl.load(used) * TILES)
    block = begin // TILES
    rank, page, token, alone = _block(
        tokens, ranks, pages, block, begin < stop, T, PAGES, RANKS, SIZE, TOGETHER
    )
    part, n, end = outputs_of(begin % TILES, N, END0, END1, END2, END3, END4, PARTS, BLOCK_N)
    weights = _load_b(b, 0, page, rank, n, end, N, PAGE, RANKS)
    wait(PDL)
    for item in range(begin, stop):
        at, inside = (
            out + (token * N)[:, None] + n[None, :],
            (token < T)[:, None] & (n < end)[None, :],
        )
        acc = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        for first in range(0, rank, TOGETHER):
            if first > 0:
                page_of = _pages(pages, block, first, rank, PAGES, RANKS, TOGETHER)
                weights = _load_b(b, first, page_of, rank, n, end, N, PAGE, RANKS)
            values = _hidden(
                hidden, token, alone, part, first, rank, T, PAGES, RANKS, PARTS, SPLITS, TOGETHER
            )
            acc = tl.dot(values.to(weights.dtype), weights, acc, input_precision="ieee")
        tl.store(at, acc.to(out.dtype.element_ty), mask=inside)
        later = item + 1
        if later // TILES != block:
            block = later // TILES
            rank, page, token, alone = _block(
                tokens, ranks, pages, block, later < stop, T, PAGES, RANKS, SIZE, TOGETHER
            )
        part, n, end = outputs_of(later % TILES, N, END0, END1, END2, END3, END4, PARTS, BLOCK_N)
        weights = _load_b(b, 0, page, tl.where(later < stop, rank, 0), n, end, N, PAGE, RANKS)


@cached_launch
@triton.jit(do_not_specialize=["T"])
def _expand_gated(
    hidden,
    b,
    product,
    out,
    tokens,
    pages,
    ranks,
    used,
    T,
    N,
    PAGE,
    TILES,
    PAGES: tl.constexpr,
    RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    TOGETHER: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    begin, stop = _range(tl.load(used + 1) * TILES)
    block = begin // TILES
    rank, page, token, alone = _block(
        tokens, ranks, pages, block, begin < stop, T, PAGES, RANKS, SIZE, TOGETHER
    )
    n = begin % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    weights = _load_b(b, 0, page, rank, n, N, 2 * N, PAGE, RANKS)
    up_weights = _load_b(b + N, 0, page, rank, n, N, 2 * N, PAGE, RANKS)
    wait(PDL)
    for item in range(begin, stop):
        at, inside = (
            product + (token * (2 * N))[:, None] + n[None, :],
            (token < T)[:, None] & (n < N)[None, :],
        )
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + N, mask=inside, other=0.0).to(tl.float32)
        for first in range(0, rank, TOGETHER):
            if first > 0:
                page_of = _pages(pages, block, first, rank, PAGES, RANKS, TOGETHER)
                weights = _load_b(b, first, page_of, rank, n, N, 2 * N, PAGE, RANKS)
                up_weights = _load_b(b + N, first, page_of, rank, n, N, 2 * N, PAGE, RANKS)
            values = _hidden(
                hidden, token, alone, 0, first, rank, T, PAGES, RANKS, 2, SPLITS, TOGETHER
            )
            gate = tl.dot(values.to(weights.dtype), weights, gate, input_precision="ieee")
            values = _hidden(
                hidden, token, alone, 1, first, rank, T, PAGES, RANKS, 2, SPLITS, TOGETHER
            )
            up = tl.dot(values.to(weights.dtype), up_weights, up, input_precision="ieee")
        type = out.dtype.element_ty  # rounded as separate operations would
        gate = apply_activation(gate.to(type).to(tl.float32), KIND).to(type).to(tl.float32)
        result = (gate * up.to(type).to(tl.float32)).to(type)
        tl.store(out + (token * N)[:, None] + n[None, :], result, mask=inside)
        later = item + 1
        if later // TILES != block:
            block = later // TILES
            rank, page, token, alone = _block(
                tokens, ranks, pages, block, later < stop, T, PAGES, RANKS, SIZE, TOGETHER
            )
        n = later % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
        left = tl.where(later < stop, rank, 0)
        weights = _load_b(b, 0, page, left, n, N, 2 * N, PAGE, RANKS)
        up_weights = _load_b(b + N, 0, page, left, n, N, 2 * N, PAGE, RANKS)


def lora_add(
    x: torch.Tensor, weights: LoraWeights, rows: LoraRows, out: torch.Tensor
) -> torch.Tensor:
    """Adds the adapters' contributions for x to `out`, and returns `out`.

    Args:
        x: [T, inputs], contiguous.
        weights: adapters' matrices of the product.
        rows: the tokens, sorted.
        out: [T, outputs], contiguous; may have more precise numbers than x.
    """
    hidden, constants = _shrink_rows(x, weights, rows)
    outputs = weights.b.shape[2]
    tiles = sum(cdiv(each, _BLOCK_N) for each in weights.outputs)
    _expand[(_program_count(x, len(rows.ranks) * tiles, _EXPANDING),)](
        hidden,
        weights.b,
        out,
        rows.blocks.pairs,
        rows.pages,
        rows.ranks,
        rows.used,
        len(x),
        outputs,
        weights.page_size,
        *weights.ends,
        tiles,
        PARTS=len(weights.outputs),
        BLOCK_N=_BLOCK_N,
        **constants,
    )
    return out


def lora_add_and_gate(
    x: torch.Tensor, weights: LoraWeights, rows: LoraRows, product: torch.Tensor, activation: str
) -> torch.Tensor:
    """Adds the adapters' contributions for x to the output of a linear layer, and returns act(gate)
    * up [T, N] of the sum.

    Args:
        x: [T, inputs], contiguous.
        weights: adapters' matrices of gates and ups.
        rows: the tokens, sorted.
        product: [T, 2 N], gates first, contiguous.
        activation: "silu", "gelu" or "gelu_tanh".
    """
    hidden, constants = _shrink_rows(x, weights, rows)
    outputs = weights.outputs[0]
    out = x.new_empty((len(x), outputs))
    tiles = cdiv(outputs, _BLOCK_N)
    _expand_gated[(_program_count(x, len(rows.ranks) * tiles, _EXPANDING),)](
        hidden,
        weights.b,
        product,
        out,
        rows.blocks.pairs,
        rows.pages,
        rows.ranks,
        rows.used,
        len(x),
        outputs,
        weights.page_size,
        tiles,
        KIND=activation,
        BLOCK_N=_BLOCK_N,
        **constants,
    )
    return out


def _shrink_rows(
    x: torch.Tensor, weights: LoraWeights, rows: LoraRows
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Multiplies the rows by their adapters' A. Returns the result, float32 [splits, T, parts,
    longest rank], and the constants for the launch that reads it.
    """
    parts, inputs, (blocks, pages) = len(weights.outputs), x.shape[1], rows.pages.shape
    few = rows.blocks.size == _SMALL
    splits = min(_MAX_SPLITS, round_up_to_power_of_2(cdiv(inputs, _SPLIT))) if few else 1
    hidden = torch.empty(
        (splits, len(x), parts, pages * RANKS), dtype=torch.float32, device=x.device
    )
    constants = dict(
        PAGES=pages,
        RANKS=RANKS,
        SPLITS=splits,
        SIZE=rows.blocks.size,
        TOGETHER=_TOGETHER,
        num_warps=4,
        **pdl_options(x.device),
    )
    _shrink[(_program_count(x, blocks * parts * splits, _SHRINKING),)](
        x,
        weights.a,
        hidden,
        rows.blocks.pairs,
        rows.pages,
        rows.ranks,
        rows.used,
        len(x),
        inputs,
        weights.page_size,
        PARTS=parts,
        BLOCK_K=_BLOCK_K if few else _LONG_BLOCK_K,
        **constants,
    )
    return hidden, constants


def _program_count(x: torch.Tensor, items: int, resident: int) -> int:
    """Returns the number of programs for this many items, if a multiprocessor can run `resident`
    programs concurrently.
    """
    return min(items, resident * properties_of(x.device).multiprocessors)
