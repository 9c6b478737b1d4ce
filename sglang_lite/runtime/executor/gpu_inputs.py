"""Inputs of a batch as host arrays for a device plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.scheduler.batch import Batch

BLOCK_SIZES = (16, 64, 128)  # queries that a program of prefill_attention can have


@dataclass(frozen=True, slots=True)
class GpuInputs:
    """Batch in the order of a device plan, as host arrays.

    Attributes:
        ids, slots, positions: int32 [T], as in DevicePlan.
        blocks: int32 [blocks, 4], as in DevicePlan.
        block_size: maximum number of tokens in a block.
        last: int64 [rows], index of each row's last token.
        decoding: number of tokens at the start of the batch that are decoded: each attends to its slot's stored tokens
            up to itself.
        fresh: as in DevicePlan.
    """

    ids: Ints
    slots: Ints
    positions: Ints
    blocks: Ints
    block_size: int
    last: Ints
    decoding: int
    fresh: int = 0


def build_gpu_inputs(batch: Batch, table: SlotTable, most_decoded: int, *, most_read: int, together: int) -> GpuInputs:
    """Returns the inputs of a batch: decoded tokens first, then the tokens of all other rows in blocks.

    A row with several tokens (a short prompt, or tokens that a grammar forces) can be computed as that many decoding
    rows of one slot: all keys and values of a layer are stored before attention, and no token sees beyond its own
    position. A step of decoding rows alone can run as a captured graph that includes the draws, and the tokens before a
    few new ones are read by more programs than in blocks.

    Args:
        batch: rows of the step.
        table: slot table that the batch refers to.
        most_decoded: maximum number of tokens decoded in one step.
        most_read: maximum number of token reads by decoded rows with several tokens; 0 if the step can't be captured.
        together: number of tokens of a row with more than FEW tokens that read the tokens before them at once.
    """
    counts = batch.ends - batch.starts
    last = np.cumsum(counts) - 1
    if batch.singles == len(counts):
        slots, positions = batch.slots, batch.starts
        ids = np.where(batch.pending, -1, table.tokens[slots, positions]).astype(np.int32)
        return GpuInputs(ids, slots, positions, _NO_BLOCKS, 16, last, len(counts))
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = (np.arange(len(rows)) - np.repeat(last + 1 - counts, counts) + np.repeat(batch.starts, counts)).astype(
        np.int32
    )
    slots = batch.slots[rows]
    ids = table.tokens[slots, positions]
    ids[last[batch.pending]] = -1
    longest = int(counts.max())
    most = most_decoded if longest <= _SHORT else min(_TOGETHER, most_decoded)
    if len(rows) <= most and (longest <= FEW or _read(batch, together) <= most_read):
        return GpuInputs(ids, slots, positions, _NO_BLOCKS, 16, last, len(rows))
    size = next((size for size in BLOCK_SIZES if longest <= size), BLOCK_SIZES[-1])
    blocks: list[tuple[int, int, int, int]] = []
    for i in range(batch.singles, len(counts)):
        first, count, slot, start = (
            int(last[i] + 1 - counts[i]),
            int(counts[i]),
            int(batch.slots[i]),
            int(batch.starts[i]),
        )
        blocks += [(first + at, min(size, count - at), slot, start + at) for at in range(0, count, size)]
    blocks.sort(key=lambda b: -b[3])  # blocks that read most tokens first
    fresh = 0 if batch.starts[batch.singles :].any() else longest
    return GpuInputs(ids, slots, positions, np.array(blocks, dtype=np.int32), size, last, batch.singles, fresh)


def _read(batch: Batch, together: int) -> int:
    """Returns the number of token reads if rows with several tokens are decoded: each token reads its row's new
    tokens up to itself, and all tokens before these, which a row with more than FEW tokens reads once for `together`
    tokens."""
    starts, ends = batch.starts[batch.singles :].astype(np.int64), batch.ends[batch.singles :]
    counts = ends - starts
    before = np.where(counts > FEW, -(-counts // together), counts) * starts
    return int((counts * (counts + 1) // 2 + before).sum())


FEW = 16  # tokens of a row up to which decoding is cheaper, though each reads the row's keys and values
# Most tokens of the longest row for which a step is decoded up to `most_decoded` tokens, and most tokens of a decoded
# step with longer rows. On an H200, Qwen3-0.6B takes 3.3 ms to decode a row of 256 tokens, and 4.7 ms behind 8,000
# cached ones; in blocks of a captured graph 2.9 and 5.9 ms. For 400 tokens these are 4.2 and 6.4 ms, in blocks 3.3 and
# 6.2 ms.
_SHORT, _TOGETHER = 64, 256
READ = 1 << 20  # token reads times KV heads that rows with several tokens may need in a decoded step
_NO_BLOCKS: Ints = np.zeros((0, 4), dtype=np.int32)
