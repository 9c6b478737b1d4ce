"""Groups of decoding rows whose sequences begin with the same pages, so that attention can read
these pages once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.executor.step_record import SlotPages, StepRecord
from sglang_lite.runtime.kv_cache.pages import Ints

# Minimum number of token reads that a group must save to pay for the extra kernel.
MIN_SAVED_TOKENS = 4096
# Factor on the above for latents: all heads share one latent, and rows that read the same latents
# find them in the L2 cache.
LATENT_SAVING_FACTOR = 32
MAX_CHUNKS = 16


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that have the same first `pages` pages."""

    rows: Ints
    pages: int


def find_groups(pages: Ints, shareable_pages: Ints) -> list[Group]:
    """Returns the groups of rows that save the most reads. Each row is in at most one group.

    Args:
        pages: int32 [rows, pages], pages of each row.
        shareable_pages: int32 [rows], number of pages of each row that may be shared.
    """
    _, groups = _find_best_groups(pages, shareable_pages, np.arange(len(pages), dtype=np.int32), 0)
    return groups


def _find_best_groups(
    pages: Ints, shareable_pages: Ints, rows: Ints, matched: int
) -> tuple[int, list[Group]]:
    """Finds the groups of `rows` that save the most page reads. The first `matched` pages of these
    rows are known to be the same. Returns the number of reads saved, and the groups.
    """
    saved = 0
    groups = list[Group]()
    rows = rows[shareable_pages[rows] > matched]
    if len(rows) < 2:
        return saved, groups
    first = pages[rows, matched]
    order = np.argsort(first, kind="stable")
    # bounds of runs of equal pages
    bounds = np.flatnonzero(np.diff(first[order], prepend=-1, append=-1))
    for run in np.flatnonzero(np.diff(bounds) > 1):
        alike = rows[order[bounds[run] : bounds[run + 1]]]
        limit = int(shareable_pages[alike].min())
        same = (pages[alike, matched:limit] == pages[alike[:1], matched:limit]).all(0)
        common = matched + (int(same.argmin()) if not same.all() else len(same))
        together = (len(alike) - 1) * common
        apart, smaller = _find_best_groups(pages, shareable_pages, alike, common)
        if apart > together:
            saved = saved + apart
            groups = groups + smaller
        else:
            saved = saved + together
            groups = [*groups, Group(alike, common)]
    return saved, groups


@dataclass(frozen=True, slots=True)
class SharedPrefixArrays:
    """Host arrays of `kernels.attention_metadata.SharedPrefixes`."""

    lengths: Ints
    chunks: Ints
    order: Ints
    items: Ints


def split_shared_prefixes(
    pages: Ints,
    shareable_pages: Ints,
    slots: Ints,
    page_size: int,
    *,
    rows_per_block: int,
    max_items: int,
    target_chunks: int,
    min_saving_factor: int = 1,
    borders: Ints | None = None,
) -> SharedPrefixArrays | None:
    """Splits the prefixes that rows share into chunks, each for one program of a kernel. Returns
    None if no prefix is worth sharing.

    Args:
        pages, shareable_pages: same as for `find_groups`; only full pages that no longer change may
            be shared.
        slots: slot of each row.
        page_size: tokens in a page.
        rows_per_block: maximum number of rows of a program.
        max_items: maximum number of items, at least the number of rows.
        target_chunks: number of chunks that keep the device busy; more only increase the cost of
            merging.
        min_saving_factor: factor on the number of token reads that a group must save; above 1 if
            reads are cheaper than usual.
        borders: ascending positions, starting at 0, at which prefixes and chunks may end; None for
            no restriction.
    """
    groups = [
        g
        for g in find_groups(pages, shareable_pages)
        if _saves_enough_tokens(g, page_size, min_saving_factor)
    ]
    return _split_groups(
        GroupArrays.from_groups(groups),
        slots,
        page_size,
        rows_per_block=rows_per_block,
        max_items=max_items,
        target_chunks=target_chunks,
        borders=borders,
    )


def _saves_enough_tokens(group: Group, page_size: int, min_saving_factor: int) -> bool:
    return (len(group.rows) - 1) * group.pages * page_size >= min_saving_factor * MIN_SAVED_TOKENS


@dataclass(frozen=True, slots=True)
class GroupArrays:
    """Groups of rows, stored in arrays because there may be many: a step with drafts has one group
    per row.

    Attributes:
        rows: int32 [N], rows of all groups, one group after another.
        sizes: int64 [G], number of rows of each group.
        pages: int64 [G], number of pages that the rows of each group share.
    """

    rows: Ints
    sizes: NDArray[np.int64]
    pages: NDArray[np.int64]

    @classmethod
    def from_groups(cls, groups: Sequence[Group]) -> GroupArrays:
        rows = (
            np.concatenate([group.rows for group in groups]).astype(np.int32)
            if groups
            else _NO_ROWS
        )
        sizes, pages = (
            zip(*((len(group.rows), group.pages) for group in groups)) if groups else ((), ())
        )
        return cls(rows, np.array(sizes, dtype=np.int64), np.array(pages, dtype=np.int64))

    def select_groups(self, sharing: NDArray[np.bool_]) -> GroupArrays:
        """Returns the groups for which `sharing` [G] is True."""
        return GroupArrays(
            self.rows[np.repeat(sharing, self.sizes)], self.sizes[sharing], self.pages[sharing]
        )

    def followed_by(self, others: GroupArrays) -> GroupArrays:
        """Concatenates these groups and others."""
        rows: Ints = np.concatenate((self.rows, others.rows))
        sizes = np.concatenate((self.sizes, others.sizes))
        pages = np.concatenate((self.pages, others.pages))
        return GroupArrays(rows, sizes, pages)


_NO_ROWS: Ints = np.zeros(0, dtype=np.int32)


def _split_groups(
    groups: GroupArrays,
    slots: Ints,
    page_size: int,
    *,
    rows_per_block: int,
    max_items: int,
    target_chunks: int,
    borders: Ints | None,
) -> SharedPrefixArrays | None:
    """Implements `split_shared_prefixes` for groups that are already known."""
    if borders is not None:
        groups = groups.select_groups(groups.pages * page_size >= borders[1])
    sizes = groups.sizes
    tokens = groups.pages * page_size
    if not len(sizes):
        return None
    if borders is not None:
        tokens = borders[np.searchsorted(borders, tokens, side="right") - 1].astype(np.int64)
    at = np.cumsum(sizes) - sizes  # index of each block of a group's rows in `groups.rows`
    owners = slots[groups.rows[at]]
    if (blocks := -(-sizes // rows_per_block)).max() > 1:
        group, block = _number_items(blocks)
        at = at[group] + block * rows_per_block
        sizes = sizes[group] - block * rows_per_block
        sizes = np.minimum(sizes, rows_per_block)
        tokens = tokens[group]
        owners = owners[group]
    # Chunks have about the same number of tokens; `max_items` limits their number.
    work = int(tokens.sum())
    spare_items = max_items - len(tokens)
    counts = np.minimum(-(-tokens // 256), np.maximum(target_chunks * tokens // work, 1))
    counts = np.minimum(np.minimum(counts, MAX_CHUNKS), 1 + spare_items * tokens // work)
    block, chunk = _number_items(counts)
    length = tokens[block]
    if borders is None:
        step = (-(-tokens // (counts * 64)) * 64)[block]
        starts = chunk * step
        ends = np.minimum(starts + step, length)
    else:
        starts, ends = (
            borders[np.searchsorted(borders, -(-length * end // counts[block]))]
            for end in (chunk, chunk + 1)
        )
    if not (kept := starts < ends).all():  # rounding made some chunks empty
        starts = starts[kept]
        ends = ends[kept]
        counts = np.bincount(block[kept], minlength=len(counts))
        block, chunk = _number_items(counts)
    if len(block) > max_items:
        return None
    items = np.empty((len(block), 6), dtype=np.int32)
    for i, column in enumerate((at[block], sizes[block], owners[block], starts, ends, chunk)):
        items[:, i] = column
    found = np.zeros((2, len(slots)), dtype=np.int32)
    found[0, groups.rows] = np.repeat(tokens, sizes)
    found[1, groups.rows] = np.repeat(counts, sizes)
    return SharedPrefixArrays(found[0], found[1], groups.rows, items)


def _number_items(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Expands `counts`, the number of items at each index. Returns two arrays with an entry for
    every item: its index in `counts`, and its number among the items of that index.
    """
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)


class PrefixGroups:
    """Finds which decoding rows of each step share a prefix.

    Args:
        table: pages of the slots.
        target_chunks: number of chunks that keep the device busy; more only increase the cost of
            merging.
        rows_per_block: maximum number of rows of a program.
        min_saving_factor, borders: as for `split_shared_prefixes`.
    """

    def __init__(
        self,
        table: SlotPages,
        target_chunks: int,
        rows_per_block: int,
        min_saving_factor: int = 1,
        borders: Ints | None = None,
    ) -> None:
        self._table = table
        self._target_chunks = target_chunks
        self.rows_per_block = rows_per_block
        self._min_saving_factor = min_saving_factor
        self._borders = borders
        self._key: bytes = b""  # identifies the rows of the previous step
        self._groups = GroupArrays.from_groups([])
        self._prefixes: SharedPrefixArrays | None = None

    def find_prefixes(
        self, record: StepRecord, padded_rows: Callable[[int], int], *, multi_token_rows: bool
    ) -> SharedPrefixArrays | None:
        """Returns the shared prefixes of a step's decoding rows, or None if none are worth sharing.
        Groups are searched again only if the decoding rows have changed.

        Args:
            record: the step.
            padded_rows: function that maps a number of rows to the size of the graph that computes
                them.
            multi_token_rows: whether rows with several tokens are also decoded. The tokens of such
                a row share the pages before them.
        """
        count = record.singles
        slots = record.slots[:count]
        key = slots.tobytes() + record.epochs[:count].tobytes()
        if key != self._key:
            self._key = key
            self._groups = GroupArrays.from_groups(
                self._find_groups(slots, record.starts[:count]) if count > 1 else []
            )
            self._prefixes = self._split(self._groups, slots, padded_rows(count))
        if not multi_token_rows:
            return self._prefixes
        own = self._groups_of_rows(record)
        if own is None:
            return self._prefixes
        return self._split(self._groups.followed_by(own), record.token_slots, len(record.ids))

    def _split(
        self, groups: GroupArrays, slots: Ints, spare_items: int
    ) -> SharedPrefixArrays | None:
        return _split_groups(
            groups,
            slots,
            self._table.page_size,
            rows_per_block=self.rows_per_block,
            max_items=spare_items + self._target_chunks,
            target_chunks=self._target_chunks,
            borders=self._borders,
        )

    def _find_groups(self, slots: Ints, starts: Ints) -> list[Group]:
        """Groups decoding rows with one new token by shared prefix. Returns only groups that save
        enough reads.
        """
        table = self._table
        shareable_pages = starts // table.page_size
        first = table.pages[slots, 0][shareable_pages > 0]
        if len(np.unique(first)) == len(first):  # usual if rows change at every step
            return []
        groups = find_groups(table.pages[slots, : int(shareable_pages.max())], shareable_pages)
        return [
            group
            for group in groups
            if _saves_enough_tokens(group, table.page_size, self._min_saving_factor)
        ]

    def _groups_of_rows(self, record: StepRecord) -> GroupArrays | None:
        """Returns a group for each row with several tokens, whose members are these tokens. They
        share the pages before them. Returns None if sharing would not save enough reads.
        """
        counts = (record.ends - record.starts).astype(np.int64)
        size = self._table.page_size
        pages = record.starts.astype(np.int64) // size
        if int(((counts - 1) * pages).sum()) * size < self._min_saving_factor * MIN_SAVED_TOKENS:
            return None
        tokens = GroupArrays(np.arange(len(record.ids), dtype=np.int32), counts, pages)
        return tokens.select_groups((counts > 1) & (pages > 0))
