"""Products with the matrices of LoRA adapters, added to the products of a batch whose tokens have different adapters.

    hidden[t, p] = A[adapter of t, p] x[t]                 shrink: for each part p of the product
    out[t, n] += B[adapter of t, n] hidden[t, part of n]   expand

Tokens are sorted by adapter once a step (`experts_order`), so a program reads an adapter's matrix for a whole block of
its tokens. Few tokens have few blocks, so their sums over inputs are split among programs; the readers add the parts
up, always in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.activation import apply_activation
from sglang_lite.runtime.kernels.experts_order import ExpertBlocks, experts_order
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.lora_weights import RANKS, LoraStep, LoraWeights
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv

_FEW = 256  # most tokens in blocks of the smaller size
_SMALL, _LARGE = 16, 64  # tokens of a block
_BLOCK_K = 256
_MAX_SPLITS = 16
_TOGETHER = 16  # ranks that are multiplied at once: matrix units take no fewer


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Tokens of a step, sorted by adapter.

    Attributes:
        blocks: blocks of tokens of one adapter each. Tokens without one count as an adapter of their own, the last.
        pages, ranks: as in LoraStep.
    """

    blocks: ExpertBlocks
    pages: torch.Tensor
    ranks: torch.Tensor


def lora_rows(step: LoraStep, slots: torch.Tensor) -> LoraRows:
    """Sorts tokens by adapter.

    Args:
        step: adapters of the step.
        slots: int32 [T], slot of each token.
    """
    adapters = step.of_slot[slots].unsqueeze(1)
    blocks = experts_order(adapters, len(step.ranks) + 1, _SMALL if len(slots) <= _FEW else _LARGE)
    return LoraRows(blocks, step.pages, step.ranks)


@triton.jit
def _block(tokens, adapters, ranks, ADAPTERS: tl.constexpr, SIZE: tl.constexpr):
    """Returns the adapter, the rank and the tokens [SIZE] of a program's block. The adapter is -1 for an unused block;
    tokens without an adapter have rank 0."""
    block = tl.program_id(0)
    adapter = tl.load(adapters + block)
    rank = tl.load(ranks + adapter, mask=(adapter >= 0) & (adapter < ADAPTERS), other=0)
    token = tl.load(tokens + block * SIZE + tl.arange(0, SIZE))
    return adapter, rank, token.to(tl.int64)


@cached_launch
@triton.jit(do_not_specialize=["T"])
def _shrink(
    x, a, hidden, tokens, adapters, pages, ranks, T, K, PAGE,
    ADAPTERS: tl.constexpr, PAGES: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    SIZE: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    # The tokens were sorted before the step's first kernel, which has not overlapped with that.
    adapter, rank, token = _block(tokens, adapters, ranks, ADAPTERS, SIZE)
    wait(PDL)  # also where nothing is to do: kernels after this one wait for it alone
    if rank == 0:
        return
    part, split = tl.program_id(1), tl.program_id(2)
    k = tl.arange(0, BLOCK_K)
    rows = x + token * K
    for first in range(0, rank, TOGETHER):
        r = first + tl.arange(0, TOGETHER)
        page = tl.load(pages + adapter * PAGES + r // RANKS, mask=r < rank, other=0).to(tl.int64)
        matrix = a + page * PAGE + (part * RANKS + r % RANKS) * K
        acc = tl.zeros((TOGETHER, SIZE), tl.float32)
        for at in range(split * BLOCK_K, K, BLOCK_K * SPLITS):
            inside = at + k < K
            weights = tl.load(
                matrix[:, None] + (at + k)[None, :], mask=(r < rank)[:, None] & inside[None, :], other=0.0
            )
            values = tl.load(rows[None, :] + (at + k)[:, None], mask=(token < T)[None, :] & inside[:, None], other=0.0)
            acc = tl.dot(weights, values, acc, input_precision="ieee")
        to = hidden + ((split * T + token) * PARTS + part) * (PAGES * RANKS)
        tl.store(to[None, :] + r[:, None], acc, mask=(r < rank)[:, None] & (token < T)[None, :])


@triton.jit
def _expanded(
    hidden, b, pages, adapter, rank, token, T, n, inside, N, PAGE, part,
    PAGES: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    SIZE: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Products [SIZE, BLOCK_N] of a block's hidden rows with outputs n of B."""
    acc = tl.zeros((SIZE, BLOCK_N), tl.float32)
    for first in range(0, rank, TOGETHER):
        r = first + tl.arange(0, TOGETHER)
        page = tl.load(pages + adapter * PAGES + r // RANKS, mask=r < rank, other=0).to(tl.int64)
        matrix = b + page * PAGE + r % RANKS * N
        weights = tl.load(matrix[:, None] + n[None, :], mask=(r < rank)[:, None] & inside[None, :], other=0.0)
        rows = hidden + (token * PARTS + part) * (PAGES * RANKS)
        valid = (token < T)[:, None] & (r < rank)[None, :]
        values = tl.zeros((SIZE, TOGETHER), tl.float32)
        for split in tl.static_range(SPLITS):
            of_split = rows + split * T * (PARTS * PAGES * RANKS)
            values += tl.load(of_split[:, None] + r[None, :], mask=valid, other=0.0)
        acc = tl.dot(values.to(weights.dtype), weights, acc, input_precision="ieee")
    return acc


@cached_launch
@triton.jit(do_not_specialize=["T"])
def _expand(
    hidden, b, out, tokens, adapters, pages, ranks, T, N, PAGE, END0, END1,
    ADAPTERS: tl.constexpr, PAGES: tl.constexpr, RANKS: tl.constexpr, PARTS: tl.constexpr, SPLITS: tl.constexpr,
    SIZE: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    adapter, rank, token = _block(tokens, adapters, ranks, ADAPTERS, SIZE)
    wait(PDL)  # also where nothing is to do: kernels after this one wait for it alone
    if rank == 0:
        return
    tile = tl.program_id(1)
    second = tl.cdiv(END0, BLOCK_N)  # no tile has outputs of two parts
    third = second + tl.cdiv(END1 - END0, BLOCK_N)
    part = (tile >= second).to(tl.int32) + (tile >= third).to(tl.int32)
    first = tl.where(part == 0, 0, tl.where(part == 1, END0 - second * BLOCK_N, END1 - third * BLOCK_N))
    end = tl.where(part == 0, END0, tl.where(part == 1, END1, N))
    n = first + tile * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = _expanded(
        hidden, b, pages, adapter, rank, token, T, n, n < end, N, PAGE, part,
        PAGES, RANKS, PARTS, SPLITS, SIZE, TOGETHER, BLOCK_N,
    )  # fmt: skip
    to = out + (token * N)[:, None] + n[None, :]
    inside = (token < T)[:, None] & (n < end)[None, :]
    acc += tl.load(to, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, acc.to(out.dtype.element_ty), mask=inside)


@cached_launch
@triton.jit(do_not_specialize=["T"])
def _expand_gated(
    hidden, b, product, out, tokens, adapters, pages, ranks, T, N, PAGE,
    ADAPTERS: tl.constexpr, PAGES: tl.constexpr, RANKS: tl.constexpr, SPLITS: tl.constexpr, KIND: tl.constexpr,
    SIZE: tl.constexpr, TOGETHER: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    adapter, rank, token = _block(tokens, adapters, ranks, ADAPTERS, SIZE)
    wait(PDL)
    if adapter < 0:
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (token < T)[:, None] & (n < N)[None, :]
    at = product + (token * (2 * N))[:, None] + n[None, :]
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + N, mask=inside, other=0.0).to(tl.float32)
    if rank > 0:
        gate += _expanded(
            hidden, b, pages, adapter, rank, token, T, n, n < N, 2 * N, PAGE, 0,
            PAGES, RANKS, 2, SPLITS, SIZE, TOGETHER, BLOCK_N,
        )  # fmt: skip
        up += _expanded(
            hidden, b + N, pages, adapter, rank, token, T, n, n < N, 2 * N, PAGE, 1,
            PAGES, RANKS, 2, SPLITS, SIZE, TOGETHER, BLOCK_N,
        )  # fmt: skip
    type = out.dtype.element_ty  # rounded as separate operations would
    gate = apply_activation(gate.to(type).to(tl.float32), KIND).to(type).to(tl.float32)
    tl.store(out + (token * N)[:, None] + n[None, :], (gate * up.to(type).to(tl.float32)).to(type), mask=inside)


def lora_add(x: torch.Tensor, weights: LoraWeights, rows: LoraRows, out: torch.Tensor) -> torch.Tensor:
    """Adds the adapters' products of x to `out`, and returns it.

    Args:
        x: [T, inputs], contiguous.
        weights: adapters' matrices of the product.
        rows: the tokens, sorted.
        out: [T, outputs], contiguous; may have more precise numbers than x.
    """
    hidden, constants = _shrunk(x, weights, rows)
    outputs, block = weights.b.shape[2], 128
    tiles = sum(cdiv(each, block) for each in weights.outputs)
    _expand[(len(rows.blocks.experts), tiles)](
        hidden, weights.b, out, rows.blocks.pairs, rows.blocks.experts, rows.pages, rows.ranks, len(x), outputs,
        weights.page_size, weights.outputs[0], sum(weights.outputs[:2]),
        PARTS=len(weights.outputs), BLOCK_N=block, **constants,
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
    outputs, block = weights.outputs[0], 128
    out = x.new_empty((len(x), outputs))
    _expand_gated[(len(rows.blocks.experts), cdiv(outputs, block))](
        hidden, weights.b, product, out, rows.blocks.pairs, rows.blocks.experts, rows.pages, rows.ranks, len(x),
        outputs, weights.page_size, KIND=activation, BLOCK_N=block, **constants,
    )  # fmt: skip
    return out


def _shrunk(x: torch.Tensor, weights: LoraWeights, rows: LoraRows) -> tuple[torch.Tensor, dict[str, int]]:
    """Returns the hidden rows float32 [splits, T, parts, longest rank], and constants of the launch that reads them."""
    parts, inputs, blocks = len(weights.outputs), x.shape[1], len(rows.blocks.experts)
    tokens, pages = len(x), rows.pages.shape[1]
    splits = 1
    if rows.blocks.size == _SMALL:
        splits = min(_MAX_SPLITS, cdiv(inputs, _BLOCK_K))
    hidden = torch.empty((splits, tokens, parts, pages * RANKS), dtype=torch.float32, device=x.device)
    constants = dict(
        ADAPTERS=len(rows.ranks), PAGES=pages, RANKS=RANKS, SPLITS=splits, SIZE=rows.blocks.size, TOGETHER=_TOGETHER,
        num_warps=4, **pdl_options(x.device),
    )  # fmt: skip
    _shrink[(blocks, parts, splits)](
        x, weights.a, hidden, rows.blocks.pairs, rows.blocks.experts, rows.pages, rows.ranks, tokens, inputs,
        weights.page_size, PARTS=parts, BLOCK_K=_BLOCK_K if splits > 1 else 128, **constants,
    )  # fmt: skip
    return hidden, constants
