"""A batch as arrays for a device plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.scheduler.batch import Batch

BLOCK_SIZES = (16, 64, 128)  # of queries that a program of prefill_attention has


@dataclass(frozen=True, slots=True)
class GpuInputs:
    """A batch in the order of a device plan, on the host.

    Attributes:
        ids, slots, positions: int32 [T], as in DevicePlan.
        blocks: int32 [blocks, 4], as in DevicePlan.
        block_size: most tokens in a block.
        last: int64 [rows]: index of each row's last token.
        decoding: how many tokens, the first ones, are decoded: their attention goes over all that is stored.
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
    """Rows with one token first, which are decoded; the others' tokens in blocks.

    A row with several tokens (a short prompt, or what a grammar forces) can be as many decoding rows of one slot: all
    keys and values of a layer are stored before it attends, and none looks beyond its own position. Such a step runs as
    a captured graph, which draws, too; and what is before a few new tokens is read by more programs than blocks of
    them would make.

    Args:
        batch: the step's rows.
        table: the slot table that the batch refers to.
        most_decoded: tokens that can be decoded in one step.
        most_read: by rows with several tokens that are decoded; 0 where such steps are not captured.
        together: tokens of a row of more than FEW that read what is before them at once.
    """
    counts = batch.ends - batch.starts
    last = np.cumsum(counts) - 1
    if batch.singles == len(counts):
        slots, positions = batch.slots, batch.starts
        ids = np.where(batch.unknown, -1, table.tokens[slots, positions]).astype(np.int32)
        return GpuInputs(ids, slots, positions, _NO_BLOCKS, 16, last, len(counts))
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = (np.arange(len(rows)) - np.repeat(last + 1 - counts, counts) + np.repeat(batch.starts, counts)).astype(
        np.int32
    )
    slots = batch.slots[rows]
    ids = table.tokens[slots, positions]
    ids[last[batch.unknown]] = -1
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
    blocks.sort(key=lambda b: -b[3])  # the longest first
    fresh = 0 if batch.starts[batch.singles :].any() else longest
    return GpuInputs(ids, slots, positions, np.array(blocks, dtype=np.int32), size, last, batch.singles, fresh)


def _read(batch: Batch, together: int) -> int:
    """Tokens that those of rows with several read: each its row's new ones up to itself, and what is before those."""
    starts, ends = batch.starts[batch.singles :].astype(np.int64), batch.ends[batch.singles :]
    counts = ends - starts
    before = np.where(counts > FEW, -(-counts // together), counts) * starts
    return int((counts * (counts + 1) // 2 + before).sum())


FEW = 16  # tokens of a row that are cheaper decoded, each reading the row's keys and values
# Tokens of a row, and of a step that has longer ones, that are cheaper so. On an H200 Qwen3-0.6B takes 3.3 ms for a row
# of 256 and 4.7 behind 8,000 others, as blocks of a captured graph 2.9 and 5.9; for 400 4.2 and 6.4, so 3.3 and 6.2.
_SHORT, _TOGETHER = 64, 256
READ = 1 << 20  # tokens, times KV heads, that rows with several may read in such a step
_NO_BLOCKS: Ints = np.zeros((0, 4), dtype=np.int32)
