"""Products with the matrices of LoRA adapters, added to the products of a batch whose tokens have different adapters.

    hidden[t, p] = A[adapter of t, p] x[t]                 shrink: for each part p of the product
    out[t, n] += B[adapter of t, n] hidden[t, part of n]   expand

Tokens are sorted by adapter once a step (`experts_order`), so a program reads an adapter's matrix for a whole block of
its tokens. Few tokens have few blocks, so their sums over inputs are split among programs; the readers add the parts
up, always in the same order. How many blocks there are is known on the device alone: as many programs as it runs at
once share the work, and each loads the weights of its next item before it computes one.
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
from sglang_lite.runtime.kernels.lora_weights import RANKS, LoraStep, LoraWeights
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, power_of_2

_FEW = 256  # most tokens in blocks of the smaller size
_SMALL, _LARGE = 16, 64  # tokens of a block
_BLOCK_K, _LONG_BLOCK_K, _BLOCK_N = 256, 128, 128
_SPLIT = 512  # fewest inputs of a split
_MAX_SPLITS = 16
_TOGETHER = 16  # ranks that are multiplied at once: matrix units take no fewer
_SHRINKING, _EXPANDING = 4, 8  # programs that a multiprocessor runs at once


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Tokens of a step, sorted by adapter.

    Attributes:
        blocks: blocks of tokens of one adapter each; those without an adapter come last.
        pages: int32 [blocks, longest], pages of each block's adapter.
        ranks: int32 [blocks], its rank; 0 for tokens without one.
        used: int32 [2], number of blocks with an adapter, and of all.
    """

    blocks: ExpertBlocks
    pages: torch.Tensor
    ranks: torch.Tensor
    used: torch.Tensor


@cached_launch
@triton.jit
def _describe(
    adapters, pages, ranks, block_pages, block_ranks, used, blocks,
    ADAPTERS: tl.constexpr, PAGES: tl.constexpr, BLOCK: tl.constexpr, PAGES_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
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
    """Returns the tokens of a step sorted by adapter. Must come before the step's first kernel that overlaps with
    others, so that products may read the result before previous kernels have finished.

    Args:
        step: adapters of the step.
        slots: int32 [T], slot of each token.
    """
    adapters, longest = len(step.ranks), step.pages.shape[1]
    blocks = experts_order(step.of_slot[slots].unsqueeze(1), adapters + 1, _SMALL if len(slots) <= _FEW else _LARGE)
    count = len(blocks.experts)
    pages, ranks = (blocks.experts.new_empty(shape) for shape in ((count, longest), (count,)))
    used = blocks.experts.new_empty(2)
    _describe[(count,)](
        blocks.experts, step.pages, step.ranks, pages, ranks, used, count, ADAPTERS=adapters, PAGES=longest,
        BLOCK=256, PAGES_BLOCK=power_of_2(longest), num_warps=1, **pdl_options(slots.device),
    )  # fmt: skip
    return LoraRows(blocks, pages, ranks, used)


@triton.jit
def _ranks(pages, block, first, rank, PAGES: tl.constexpr, RANKS: tl.constexpr, TOGETHER: tl.constexpr):
    """Returns ranks [TOGETHER] of a block's adapter from `first` on, and their pages."""
    r = first + tl.arange(0, TOGETHER)
    return r, tl.load(pages + block * PAGES + r // RANKS, mask=r < rank, other=0).to(tl.int64)


@triton.jit
def _load_a(a, r, page, rank, part, k, K, PAGE, RANKS: tl.constexpr):
    """Loads A [TOGETHER, BLOCK_K] of ranks r and inputs k."""
    matrix = a + page * PAGE + (part * RANKS + r % RANKS) * K
    return tl.load(matrix[:, None] + k[None, :], mask=(r < rank)[:, None] & (k < K)[None, :], other=0.0)


@cached_launch
@triton.jit(do_not_specialize=["T"])
def _shrink(
    x, a, hidden, tokens, pages, ranks, used, T, K, PAGE,
    PAGES: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, SIZE: tl.constexpr, TOGETHER: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    total = tl.load(used) * (PARTS * SPLITS)
    k = tl.arange(0, BLOCK_K)
    item = tl.program_id(0)
    rank = tl.load(ranks + item // (PARTS * SPLITS), mask=item < total, other=0)
    r, page = _ranks(pages, item // (PARTS * SPLITS), 0, rank, PAGES, RANKS, TOGETHER)
    weights = _load_a(a, r, page, rank, item // SPLITS % PARTS, item % SPLITS * BLOCK_K + k, K, PAGE, RANKS)
    wait(PDL)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        block, part, split = item // (PARTS * SPLITS), item // SPLITS % PARTS, item % SPLITS
        token = tl.load(tokens + block * SIZE + tl.arange(0, SIZE)).to(tl.int64)
        rows = x + token * K
        to = hidden + ((split * T + token) * PARTS + part) * (PAGES * RANKS)
        for first in range(0, rank, TOGETHER):
            if first > 0:
                r, page = _ranks(pages, block, first, rank, PAGES, RANKS, TOGETHER)
                weights = _load_a(a, r, page, rank, part, split * BLOCK_K + k, K, PAGE, RANKS)
            acc = tl.zeros((TOGETHER, SIZE), tl.float32)
            for at in range(split * BLOCK_K, K, BLOCK_K * SPLITS):
                inside = (token < T)[None, :] & (at + k < K)[:, None]
                values = tl.load(rows[None, :] + (at + k)[:, None], mask=inside, other=0.0)
                acc = tl.dot(weights, values, acc, input_precision="ieee")
                weights = _load_a(a, r, page, rank, part, at + BLOCK_K * SPLITS + k, K, PAGE, RANKS)
            tl.store(to[None, :] + r[:, None], acc, mask=(r < rank)[:, None] & (token < T)[None, :])
        later = item + tl.num_programs(0)
        rank = tl.load(ranks + later // (PARTS * SPLITS), mask=later < total, other=0)
        r, page = _ranks(pages, later // (PARTS * SPLITS), 0, rank, PAGES, RANKS, TOGETHER)
        weights = _load_a(a, r, page, rank, later // SPLITS % PARTS, later % SPLITS * BLOCK_K + k, K, PAGE, RANKS)


@triton.jit
def _outputs(tile, N, END0, END1, PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the part of a tile of outputs, its outputs [BLOCK_N], and the end of the part. No tile has outputs of two
    parts."""
    if PARTS == 1:
        part, first, end = 0, 0, N
    else:
        second = tl.cdiv(END0, BLOCK_N)
        third = second + tl.cdiv(END1 - END0, BLOCK_N)
        part = (tile >= second).to(tl.int32) + (tile >= third).to(tl.int32)
        first = tl.where(part == 0, 0, tl.where(part == 1, END0 - second * BLOCK_N, END1 - third * BLOCK_N))
        end = tl.where(part == 0, END0, tl.where(part == 1, END1, N))
    return part, first + tile * BLOCK_N + tl.arange(0, BLOCK_N), end


@triton.jit
def _load_b(
    b, pages, block, first, rank, n, end, N, PAGE,
    PAGES: tl.constexpr, RANKS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Loads B [TOGETHER, BLOCK_N] of a block's ranks from `first` on and outputs n; N is the outputs of a row of B."""
    r, page = _ranks(pages, block, first, rank, PAGES, RANKS, TOGETHER)
    matrix = b + page * PAGE + r % RANKS * N
    return tl.load(matrix[:, None] + n[None, :], mask=(r < rank)[:, None] & (n < end)[None, :], other=0.0)


@triton.jit
def _load_hidden(
    hidden, token, part, first, rank, T,
    PAGES: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Loads the hidden rows [SIZE, TOGETHER] of tokens, for ranks from `first` on."""
    r = first + tl.arange(0, TOGETHER)
    rows = hidden + (token * PARTS + part) * (PAGES * RANKS)
    valid = (token < T)[:, None] & (r < rank)[None, :]
    values = tl.zeros((token.shape[0], TOGETHER), tl.float32)
    for split in tl.static_range(SPLITS):
        of_split = rows + split * T * (PARTS * PAGES * RANKS)
        values += tl.load(of_split[:, None] + r[None, :], mask=valid, other=0.0)
    return values


@cached_launch
@triton.jit(do_not_specialize=["T"])
def _expand(
    hidden, b, out, tokens, pages, ranks, used, T, N, PAGE, END0, END1, TILES,
    PAGES: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, SIZE: tl.constexpr, TOGETHER: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    total = tl.load(used) * TILES
    item = tl.program_id(0)
    part, n, end = _outputs(item % TILES, N, END0, END1, PARTS, BLOCK_N)
    rank = tl.load(ranks + item // TILES, mask=item < total, other=0)
    weights = _load_b(b, pages, item // TILES, 0, rank, n, end, N, PAGE, PAGES, RANKS, TOGETHER)
    wait(PDL)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        block = item // TILES
        token = tl.load(tokens + block * SIZE + tl.arange(0, SIZE)).to(tl.int64)
        at, inside = out + (token * N)[:, None] + n[None, :], (token < T)[:, None] & (n < end)[None, :]
        acc = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        for first in range(0, rank, TOGETHER):
            if first > 0:
                weights = _load_b(b, pages, block, first, rank, n, end, N, PAGE, PAGES, RANKS, TOGETHER)
            values = _load_hidden(hidden, token, part, first, rank, T, PAGES, RANKS, PARTS, SPLITS, TOGETHER)
            acc = tl.dot(values.to(weights.dtype), weights, acc, input_precision="ieee")
        tl.store(at, acc.to(out.dtype.element_ty), mask=inside)
        later = item + tl.num_programs(0)
        part, n, end = _outputs(later % TILES, N, END0, END1, PARTS, BLOCK_N)
        rank = tl.load(ranks + later // TILES, mask=later < total, other=0)
        weights = _load_b(b, pages, later // TILES, 0, rank, n, end, N, PAGE, PAGES, RANKS, TOGETHER)


@cached_launch
@triton.jit(do_not_specialize=["T"])
def _expand_gated(
    hidden, b, product, out, tokens, pages, ranks, used, T, N, PAGE, TILES,
    PAGES: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, SIZE: tl.constexpr, TOGETHER: tl.constexpr,
    KIND: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    total = tl.load(used + 1) * TILES
    item = tl.program_id(0)
    n = item % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = tl.load(ranks + item // TILES, mask=item < total, other=0)
    weights = _load_b(b, pages, item // TILES, 0, rank, n, N, 2 * N, PAGE, PAGES, RANKS, TOGETHER)
    up_weights = _load_b(b + N, pages, item // TILES, 0, rank, n, N, 2 * N, PAGE, PAGES, RANKS, TOGETHER)
    wait(PDL)
    for item in range(tl.program_id(0), total, tl.num_programs(0)):
        block = item // TILES
        token = tl.load(tokens + block * SIZE + tl.arange(0, SIZE)).to(tl.int64)
        at, inside = product + (token * (2 * N))[:, None] + n[None, :], (token < T)[:, None] & (n < N)[None, :]
        gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(at + N, mask=inside, other=0.0).to(tl.float32)
        for first in range(0, rank, TOGETHER):
            if first > 0:
                weights = _load_b(b, pages, block, first, rank, n, N, 2 * N, PAGE, PAGES, RANKS, TOGETHER)
                up_weights = _load_b(b + N, pages, block, first, rank, n, N, 2 * N, PAGE, PAGES, RANKS, TOGETHER)
            values = _load_hidden(hidden, token, 0, first, rank, T, PAGES, RANKS, 2, SPLITS, TOGETHER)
            gate = tl.dot(values.to(weights.dtype), weights, gate, input_precision="ieee")
            values = _load_hidden(hidden, token, 1, first, rank, T, PAGES, RANKS, 2, SPLITS, TOGETHER)
            up = tl.dot(values.to(weights.dtype), up_weights, up, input_precision="ieee")
        type = out.dtype.element_ty  # rounded as separate operations would
        gate = apply_activation(gate.to(type).to(tl.float32), KIND).to(type).to(tl.float32)
        result = (gate * up.to(type).to(tl.float32)).to(type)
        tl.store(out + (token * N)[:, None] + n[None, :], result, mask=inside)
        later = item + tl.num_programs(0)
        n = later % TILES * BLOCK_N + tl.arange(0, BLOCK_N)
        rank = tl.load(ranks + later // TILES, mask=later < total, other=0)
        weights = _load_b(b, pages, later // TILES, 0, rank, n, N, 2 * N, PAGE, PAGES, RANKS, TOGETHER)
        up_weights = _load_b(b + N, pages, later // TILES, 0, rank, n, N, 2 * N, PAGE, PAGES, RANKS, TOGETHER)


def lora_add(x: torch.Tensor, weights: LoraWeights, rows: LoraRows, out: torch.Tensor) -> torch.Tensor:
    """Adds the adapters' products of x to `out`, and returns it.

    Args:
        x: [T, inputs], contiguous.
        weights: adapters' matrices of the product.
        rows: the tokens, sorted.
        out: [T, outputs], contiguous; may have more precise numbers than x.
    """
    hidden, constants = _shrunk(x, weights, rows)
    outputs, ends = weights.b.shape[2], (weights.outputs[0], sum(weights.outputs[:2]))
    tiles = sum(cdiv(each, _BLOCK_N) for each in weights.outputs)
    _expand[(_programs(x, len(rows.ranks) * tiles, _EXPANDING),)](
        hidden, weights.b, out, rows.blocks.pairs, rows.pages, rows.ranks, rows.used, len(x), outputs,
        weights.page_size, *ends, tiles, PARTS=len(weights.outputs), BLOCK_N=_BLOCK_N, **constants,
    )  # fmt: skip
    return out


def lora_gated(
    x: torch.Tensor, weights: LoraWeights, rows: LoraRows, product: torch.Tensor, activation: str
) -> torch.Tensor:
    """Returns act(gate) * up [T, N] of a product to which the adapters' are added.

    Args:
        x: [T, inputs], contiguous.
        weights: adapters' matrices of gates and ups.
        rows: the tokens, sorted.
        product: [T, 2 N], gates first, contiguous.
        activation: "silu", "gelu" or "gelu_tanh".
    """
    hidden, constants = _shrunk(x, weights, rows)
    outputs = weights.outputs[0]
    out, tiles = x.new_empty((len(x), outputs)), cdiv(outputs, _BLOCK_N)
    _expand_gated[(_programs(x, len(rows.ranks) * tiles, _EXPANDING),)](
        hidden, weights.b, product, out, rows.blocks.pairs, rows.pages, rows.ranks, rows.used, len(x), outputs,
        weights.page_size, tiles, KIND=activation, BLOCK_N=_BLOCK_N, **constants,
    )  # fmt: skip
    return out


def _shrunk(x: torch.Tensor, weights: LoraWeights, rows: LoraRows) -> tuple[torch.Tensor, dict[str, Any]]:
    """Returns the hidden rows float32 [splits, T, parts, longest rank], and constants of the launch that reads them."""
    parts, inputs, (blocks, pages) = len(weights.outputs), x.shape[1], rows.pages.shape
    few = rows.blocks.size == _SMALL
    splits = min(_MAX_SPLITS, cdiv(inputs, _SPLIT)) if few else 1
    hidden = torch.empty((splits, len(x), parts, pages * RANKS), dtype=torch.float32, device=x.device)
    constants = dict(
        PAGES=pages, RANKS=RANKS, SPLITS=splits, SIZE=rows.blocks.size, TOGETHER=_TOGETHER, num_warps=4,
        **pdl_options(x.device),
    )  # fmt: skip
    _shrink[(_programs(x, blocks * parts * splits, _SHRINKING),)](
        x, weights.a, hidden, rows.blocks.pairs, rows.pages, rows.ranks, rows.used, len(x), inputs, weights.page_size,
        PARTS=parts, BLOCK_K=_BLOCK_K if few else _LONG_BLOCK_K, **constants,
    )  # fmt: skip
    return hidden, constants


def _programs(x: torch.Tensor, items: int, resident: int) -> int:
    """Number of programs for so many items, of which a multiprocessor runs `resident` together."""
    return min(items, resident * properties_of(x.device).multiprocessors)
