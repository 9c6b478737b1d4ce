"""Sorts tokens by expert, so that each expert multiplies contiguous rows. Never waits for the host.

A pair is a token and one of its experts: token * top + index among the token's experts. The pairs
of an expert, in order, fill blocks of rows that contain no other expert; the rest of its last block
is padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

_CHUNK = 4096  # pairs that a program processes together


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Pairs of a token and an expert, sorted by expert.

    Attributes:
        pairs: int32 [blocks * size], the pair of each row; the number of pairs for padding. Rows of
            unused blocks are undefined.
        experts: int32 [blocks], expert of each block; -1 for unused blocks, which come last.
        size: rows of a block.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    size: int

    @staticmethod
    def allocate_expert_blocks(ids: torch.Tensor, experts: int, size: int) -> ExpertBlocks:
        """Allocates uninitialised blocks for the token-expert pairs in `ids`. They have room for
        every distribution of the pairs over the experts.
        """
        blocks = (ids.numel() + min(experts, ids.numel()) * (size - 1)) // size
        pairs = torch.empty(blocks * size, dtype=torch.int32, device=ids.device)
        return ExpertBlocks(pairs, torch.empty(blocks, dtype=torch.int32, device=ids.device), size)


@triton.jit
def _chunk(ids, start, count, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr):
    """Loads the expert of each pair in a chunk. Lanes past the last pair get the padding id BLOCK_E
    - 1.
    """
    at = start + tl.arange(0, CHUNK)
    return tl.load(ids + at, mask=at < count, other=BLOCK_E - 1)


@cached_launch
@triton.jit(do_not_specialize=["count"])
def _count(ids, counts, count, BLOCK_E: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait(PDL)
    chunk = tl.program_id(0)
    experts = _chunk(ids, chunk * CHUNK, count, BLOCK_E, CHUNK)
    tl.store(counts + chunk * BLOCK_E + tl.arange(0, BLOCK_E), tl.histogram(experts, BLOCK_E))


@cached_launch
@triton.jit(do_not_specialize=["count", "max_blocks"])
def _order(
    ids,
    counts,
    pairs,
    block_experts,
    count,
    max_blocks,
    COUNTED: tl.constexpr,
    E: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    own = tl.program_id(0)
    chunk = tl.program_id(1)
    last = tl.num_programs(1) - 1
    bins = tl.arange(0, BLOCK_E)
    experts = _chunk(ids, chunk * CHUNK, count, BLOCK_E, CHUNK)
    before = tl.zeros((BLOCK_E,), tl.int32)  # number of pairs of each expert in earlier chunks
    if COUNTED:
        totals = tl.zeros((BLOCK_E,), tl.int32)
        for other in range(0, last + 1):
            found = tl.load(counts + other * BLOCK_E + bins)
            totals += found
            before += tl.where(other < chunk, found, 0)
    else:
        totals = tl.histogram(experts, BLOCK_E)
    blocks = tl.where(bins < E, (totals + (SIZE - 1)) // SIZE, 0)
    first = tl.sum(tl.where(bins < own, blocks, 0), 0)
    end = first + tl.sum(tl.where(bins == own, blocks, 0), 0)
    row = first * SIZE + tl.sum(tl.where(bins == own, before, 0), 0)
    hit = (experts == own).to(tl.int32)
    tl.store(pairs + row + tl.cumsum(hit, 0) - 1, chunk * CHUNK + tl.arange(0, CHUNK), mask=hit > 0)
    if chunk == last:
        padding = row + tl.sum(hit, 0) + tl.arange(0, SIZE)
        tl.store(pairs + padding, count, mask=padding < end * SIZE)
        for start in range(first, end, BLOCK_E):
            tl.store(block_experts + start + bins, own, mask=start + bins < end)
        if own == E - 1:
            for start in range(end, max_blocks, BLOCK_E):
                tl.store(block_experts + start + bins, -1, mask=start + bins < max_blocks)


def experts_order(ids: torch.Tensor, experts: int, size: int) -> ExpertBlocks:
    """Sorts the token-expert pairs in `ids` by expert, and returns them in blocks. Reads T top
    integers for each expert, from the cache.

    Args:
        ids: int32 [T, top], contiguous. Pairs of the expert `experts`, which another rank has, are
            in no block.
        experts: number of experts of the layer, or of those that a rank has.
        size: rows of a block, a power of two.
    """
    blocks = ExpertBlocks.allocate_expert_blocks(ids, experts, size)
    count = ids.numel()
    bins = round_up_to_power_of_2(experts + 1)
    chunk = min(_CHUNK, max(128, round_up_to_power_of_2(count)))
    warps = min(max(chunk // 256, 1), 8)
    chunks = cdiv(count, chunk)
    counts = torch.empty((chunks, bins), dtype=torch.int32, device=ids.device)
    if chunks > 1:
        _count[(chunks,)](
            ids,
            counts,
            count,
            BLOCK_E=bins,
            CHUNK=chunk,
            num_warps=warps,
            **pdl_options(ids.device),
        )
    _order[(experts, chunks)](
        ids,
        counts,
        blocks.pairs,
        blocks.experts,
        count,
        len(blocks.experts),
        COUNTED=chunks > 1,
        E=experts,
        SIZE=size,
        BLOCK_E=bins,
        CHUNK=chunk,
        num_warps=warps,
        **pdl_options(ids.device),
    )
    return blocks
