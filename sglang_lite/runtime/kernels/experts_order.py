"""Tokens in the order of their experts, so that products by expert have rows side by side. Nothing waits for the host.

A pair is a token and one of its experts: token * top + place among the token's experts. The pairs of an expert, in
their order, fill blocks of rows that no other expert has rows in; the last of its blocks is filled up with none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.pdl import overlapped, start_next, wait

_CHUNK = 4096  # pairs that are looked at together


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Pairs by expert.

    Attributes:
        pairs: int32 [blocks * size]; the number of pairs in rows that have none. Rows of unused blocks mean nothing.
        experts: int32 [blocks], by block; -1 where a block is unused. Used blocks come first.
        size: rows of a block.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    size: int

    @staticmethod
    def empty(ids: torch.Tensor, experts: int, size: int) -> ExpertBlocks:
        """Room for the pairs of `ids`, however they fall."""
        blocks = (ids.numel() + min(experts, ids.numel()) * (size - 1)) // size
        pairs = torch.empty(blocks * size, dtype=torch.int32, device=ids.device)
        return ExpertBlocks(pairs, torch.empty(blocks, dtype=torch.int32, device=ids.device), size)


@triton.jit(do_not_specialize=["count", "most_blocks"])
def _order(
    ids, pairs, block_experts, count, most_blocks,
    E: tl.constexpr, SIZE: tl.constexpr, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait(PDL)
    own = tl.program_id(0)
    bins = tl.arange(0, BLOCK_E)
    at = tl.arange(0, CHUNK)
    counts = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, count, CHUNK):
        expert = tl.load(ids + start + at, mask=start + at < count, other=BLOCK_E - 1)  # a bin of no expert
        counts += tl.histogram(expert, BLOCK_E)
    blocks = tl.where(bins < E, (counts + (SIZE - 1)) // SIZE, 0)
    first = tl.sum(tl.where(bins < own, blocks, 0), 0)
    end = first + tl.sum(tl.where(bins == own, blocks, 0), 0)
    for start in range(first, end, BLOCK_E):
        tl.store(block_experts + start + bins, own, mask=start + bins < end)
    if own == E - 1:
        for start in range(end, most_blocks, BLOCK_E):
            tl.store(block_experts + start + bins, -1, mask=start + bins < most_blocks)
    row = first * SIZE
    if end > first:
        for start in range(0, count, CHUNK):
            expert = tl.load(ids + start + at, mask=start + at < count, other=BLOCK_E - 1)
            hit = (expert == own).to(tl.int32)
            tl.store(pairs + row + tl.cumsum(hit, 0) - 1, start + at, mask=hit > 0)
            row += tl.sum(hit, 0)
        rest = row + tl.arange(0, SIZE)
        tl.store(pairs + rest, count, mask=rest < end * SIZE)


def experts_order(ids: torch.Tensor, experts: int, size: int) -> ExpertBlocks:
    """Blocks of the pairs in `ids`. Reads 2 T top integers for each expert, from a cache.

    Args:
        ids: int32 [T, top], contiguous; each below `experts`.
        experts: of the layer.
        size: rows of a block; a power of two.
    """
    blocks = ExpertBlocks.empty(ids, experts, size)
    chunk = min(_CHUNK, max(128, triton.next_power_of_2(ids.numel())))
    _order[(experts,)](
        ids, blocks.pairs, blocks.experts, ids.numel(), len(blocks.experts),
        E=experts, SIZE=size, BLOCK_E=triton.next_power_of_2(experts + 1), CHUNK=chunk,
        num_warps=min(max(chunk // 256, 1), 8), **overlapped(ids.device),
    )  # fmt: skip
    return blocks
