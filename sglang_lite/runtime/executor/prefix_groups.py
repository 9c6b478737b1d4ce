"""Groups of decoding rows whose sequences begin in the same pages, so that attention can read these pages once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sglang_lite.runtime.executor.gpu_inputs import FEW
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.scheduler.batch import Batch

# Minimum number of token reads that a group must save to pay for the extra kernel.
MIN_SAVED_TOKENS = 4096
# Factor on the above for latents: all heads read the same one, and rows that read the same latents find them in the L2
# cache.
LATENTS = 32
MOST_CHUNKS = 16


@dataclass(frozen=True, slots=True)
class Group:
    """Rows whose first `pages` pages are the same."""

    rows: Ints
    pages: int


def find_groups(pages: Ints, held: Ints) -> list[Group]:
    """Returns the groups of rows that save the most reads; each row is in at most one.

    Args:
        pages: int32 [rows, most], pages of each row.
        held: int32 [rows], number of pages of each row that may be shared.
    """
    _, groups = _best(pages, held, np.arange(len(pages), dtype=np.int32), 0)
    return groups


def _best(pages: Ints, held: Ints, rows: Ints, known: int) -> tuple[int, list[Group]]:
    """Returns the number of page reads saved, and the groups that save them, for `rows`, whose first `known` pages are
    the same."""
    saved, groups = 0, list[Group]()
    rows = rows[held[rows] > known]
    if len(rows) < 2:
        return saved, groups
    first = pages[rows, known]
    order = np.argsort(first, kind="stable")
    for alike in np.split(rows[order], np.flatnonzero(np.diff(first[order])) + 1):
        if len(alike) < 2:
            continue
        most = int(held[alike].min())
        same = (pages[alike, known:most] == pages[alike[:1], known:most]).all(0)
        common = known + (int(same.argmin()) if not same.all() else len(same))
        together = (len(alike) - 1) * common
        apart, smaller = _best(pages, held, alike, common)
        if apart > together:
            saved, groups = saved + apart, groups + smaller
        else:
            saved, groups = saved + together, [*groups, Group(alike, common)]
    return saved, groups


@dataclass(frozen=True, slots=True)
class SharedWork:
    """Host arrays of `kernels.attention_metadata.SharedPrefixes`."""

    lengths: Ints
    chunks: Ints
    order: Ints
    items: Ints


def shared_work(
    pages: Ints, held: Ints, slots: Ints, page_size: int, *, rows_per_block: int, most_items: int, enough: int,
    worth: int = 1,
) -> SharedWork | None:  # fmt: skip
    """Cuts the shared prefixes of rows into pieces for programs of a kernel. Returns None if no prefix is worth it.

    Args:
        pages, held: as for `find_groups`; only pages that are full and no longer change may be shared.
        slots: slot of each row.
        page_size: tokens in a page.
        rows_per_block: maximum number of rows of a program.
        most_items: room for pieces, at least the number of rows.
        enough: number of pieces that keep the device busy; more only increase the cost of merging.
        worth: factor on the number of token reads that a group must save; above 1 if reads are cheaper than usual.
    """
    groups = [g for g in find_groups(pages, held) if _pays(g, page_size, worth)]
    return _work_of(groups, slots, page_size, rows_per_block=rows_per_block, most_items=most_items, enough=enough)


def _pays(group: Group, page_size: int, worth: int) -> bool:
    return (len(group.rows) - 1) * group.pages * page_size >= worth * MIN_SAVED_TOKENS


def _work_of(
    groups: list[Group], slots: Ints, page_size: int, *, rows_per_block: int, most_items: int, enough: int
) -> SharedWork | None:
    """Implements `shared_work` for groups that are already known."""
    if not groups:
        return None
    count = len(slots)
    lengths, chunks = np.zeros(count, dtype=np.int32), np.zeros(count, dtype=np.int32)
    blocks = [-(-len(g.rows) // rows_per_block) for g in groups]
    tokens = [g.pages * page_size for g in groups]
    # Pieces have about the same number of tokens; their number is limited by the room.
    work = sum(b * t for b, t in zip(blocks, tokens))
    items: list[tuple[int, int, int, int, int, int]] = []
    order: list[Ints] = []
    at = 0
    for group, block_count, length in zip(groups, blocks, tokens):
        room = (most_items - sum(blocks)) * length / max(work, 1)
        pieces = int(min(MOST_CHUNKS, 1 + room, -(-length // 256), max(1, enough * length // work)))
        step = -(-length // (pieces * 64)) * 64
        starts = range(0, length, step)
        lengths[group.rows], chunks[group.rows] = length, len(starts)
        order.append(group.rows)
        for block in range(block_count):
            first = block * rows_per_block
            rows = min(rows_per_block, len(group.rows) - first)
            slot = int(slots[group.rows[0]])
            items += [(at + first, rows, slot, s, min(s + step, length), i) for i, s in enumerate(starts)]
        at += len(group.rows)
    if len(items) > most_items:
        return None
    return SharedWork(lengths, chunks, np.concatenate(order).astype(np.int32), np.array(items, dtype=np.int32))


class PrefixGroups:
    """Shared prefixes of successive batches.

    Args:
        table: slot table that batches refer to.
        enough: number of pieces that keep the device busy; more only increase the cost of merging.
        rows_per_block: maximum number of rows of a program.
        worth: as for `shared_work`.
    """

    def __init__(self, table: SlotTable, enough: int, rows_per_block: int, worth: int = 1) -> None:
        self._table, self._enough, self.rows_per_block, self._worth = table, enough, rows_per_block, worth
        self._key: bytes = b""  # identifies the rows of the previous batch
        self._groups: list[Group] = []
        self._work: SharedWork | None = None

    def find(self, batch: Batch, padded: Callable[[int], int], *, several: bool) -> SharedWork | None:
        """Returns the work on prefixes that the batch's decoding rows share, or None. Groups are searched again only if
        the decoding rows have changed.

        Args:
            batch: batch of the step.
            padded: function that returns the number of rows of the graph that runs a given number.
            several: whether rows with several tokens are decoded, too. The tokens of each share what precedes them.
        """
        count = batch.singles
        slots = batch.slots[:count]
        key = slots.tobytes() + batch.epochs[:count].tobytes()
        if key != self._key:
            self._key = key
            self._groups = self._found(slots, batch.starts[:count]) if count > 1 else []
            self._work = self._of(self._groups, slots, padded(count))
        if not several:
            return self._work
        own, rows = self._of_rows(batch)
        return self._of([*self._groups, *own], rows, len(rows)) if own else self._work

    def _of(self, groups: list[Group], slots: Ints, room: int) -> SharedWork | None:
        return _work_of(
            groups, slots, self._table.page_size,
            rows_per_block=self.rows_per_block, most_items=room + self._enough, enough=self._enough,
        )  # fmt: skip

    def _found(self, slots: Ints, starts: Ints) -> list[Group]:
        """Returns the groups of rows with one token that are worth it."""
        table = self._table
        held = starts // table.page_size
        groups = find_groups(table.pages[slots, : int(held.max())], held)
        return [group for group in groups if _pays(group, table.page_size, self._worth)]

    def _of_rows(self, batch: Batch) -> tuple[list[Group], Ints]:
        """Returns a group for each row with more than FEW tokens that is worth it, and the slot of each token of the
        batch."""
        counts = batch.ends - batch.starts
        first = np.cumsum(counts) - counts
        groups = [
            Group(
                np.arange(first[i], first[i] + counts[i], dtype=np.int32), int(batch.starts[i]) // self._table.page_size
            )
            for i in np.flatnonzero(counts > FEW)
        ]
        own = [group for group in groups if _pays(group, self._table.page_size, self._worth)]
        return own, np.repeat(batch.slots, counts)
