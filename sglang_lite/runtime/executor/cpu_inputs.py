"""A batch as tensors: ids, positions, and who reads which cache slots."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.runtime.executor.prefix_groups import find_groups
from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionPlan,
    DecodeGroup,
    DecodeRows,
    ExtendGroup,
    ExtendRow,
)
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.scheduler.batch import Batch

# Tokens that need not be read again, from which on rows that begin alike are computed together.
_SAVED_TOKENS = 4096
# Tokens that a group of decoding rows may read for nothing: about what another group takes.
_PADDING = 512
# Tokens that a row of several new ones may read in all, to be computed as so many decoding rows: about what it takes to
# compute it by itself.
_FEW_READ = 128


@dataclass(frozen=True, slots=True)
class CpuInputs:
    """A batch as the model on a CPU takes it.

    Attributes:
        ids, positions: int64 [T], rows one after another.
        plan: for attention.
        last: int64 [rows]: index of each row's last token.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    plan: AttentionPlan
    last: torch.Tensor


def build_cpu_inputs(batch: Batch, table: SlotTable, drawn: Ints, *, one_by_one: bool = False) -> CpuInputs:
    """Tensors of a batch.

    Args:
        batch: the step's rows.
        table: the slot table that the batch refers to.
        drawn: int32 [slots]: the token that was drawn last for each slot.
        one_by_one: each token's attention is computed by itself, so that it does not depend on what comes with it.
    """
    counts = batch.ends - batch.starts
    last = np.cumsum(counts) - 1
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(len(rows)) - np.repeat(last + 1 - counts, counts) + np.repeat(batch.starts, counts)
    slots = batch.slots[rows]
    size = table.page_size
    ids = table.tokens[slots, positions]
    ids[last[batch.unknown]] = drawn[batch.slots[batch.unknown]]
    store_at = table.pages[slots, positions // size].astype(np.int64) * size + positions % size
    first = last + 1 - counts
    lengths = positions + 1  # what each token sees
    groups: tuple[ExtendGroup, ...] = ()
    grouped = np.zeros(len(counts), dtype=bool)
    if not one_by_one:
        groups, grouped = _groups(batch, table, first, last)
    # A batch of one is faster as a row by itself.
    singles = np.arange(batch.singles if batch.singles > 1 and not one_by_one else 0)
    extends = [
        ExtendRow(int(first[i]), int(last[i]) + 1, _read_at(table, batch.slots[i], batch.ends[i]))
        for i in range(len(singles), len(counts))
        if not grouped[i]
    ]
    several: list[slice | NDArray[np.int64]] = []
    if one_by_one:
        alone, extends = list(range(len(rows))), []  # tokens that are computed by themselves
    else:
        few = {} if len(batch.slots) == 1 else _few(extends)
        extends = [row for row in extends if row.start not in few]
        at = np.concatenate([singles[~grouped[singles]], *(np.arange(start, end) for start, end in few.items())])
        alone, several = _by_length(at, lengths[at])
    extends += [ExtendRow(t, t + 1, _read_at(table, slots[t], lengths[t])) for t in alone]
    extends += [row for group in groups for row in group.rows]
    return CpuInputs(
        ids=torch.from_numpy(ids.astype(np.int64)),
        positions=torch.from_numpy(positions.astype(np.int64)),
        plan=AttentionPlan(
            torch.from_numpy(store_at),
            tuple(_decode_group(table, tokens, slots[tokens], lengths[tokens]) for tokens in several),
            tuple(extends),
            groups,
        ),
        last=torch.from_numpy(last.astype(np.int64)),
    )


def _few(extends: list[ExtendRow]) -> dict[int, int]:
    """First tokens of rows that read so little that their tokens are computed as decoding rows, with their ends. Keys
    and values are stored before any are read, so a token sees those of its own step, too."""
    return {row.start: row.end for row in extends if (row.end - row.start) * row.length <= _FEW_READ}


def _groups(
    batch: Batch, table: SlotTable, first: Ints, last: Ints
) -> tuple[tuple[ExtendGroup, ...], NDArray[np.bool_]]:
    """Rows that begin in the same pages, of which enough is computed; and which rows those are.

    Args:
        first, last: each row's first and last token.
    """
    grouped = np.zeros(len(first), dtype=bool)
    held = batch.starts // table.page_size
    if len(held) < 2 or int(held.sum()) * table.page_size < _SAVED_TOKENS:
        return (), grouped
    groups = []
    for group in find_groups(table.pages[batch.slots, : int(held.max())], held):
        shared = group.pages * table.page_size
        for rows in _of_one_size(group.rows, last + 1 - first, batch.ends - shared, shared):
            if (len(rows) - 1) * shared < _SAVED_TOKENS:
                continue
            grouped[rows] = True
            groups.append(ExtendGroup.of(
                tuple(
                    ExtendRow(int(first[i]), int(last[i]) + 1, _read_at(table, batch.slots[i], batch.ends[i]))
                    for i in rows
                ),
                shared,
            ))  # fmt: skip
    return tuple(groups), grouped


def _of_one_size(rows: Ints, counts: Ints, own: Ints, shared: int) -> list[list[int]]:
    """Rows of a group, apart where padding them to one size would take more than what they share.

    Args:
        counts, own: of all rows, new tokens and what they read beside that.
        shared: tokens.
    """
    found: list[list[int]] = []
    most = longest = tokens = 0
    for row in sorted(rows.tolist(), key=lambda row: -int(counts[row]) * int(own[row])):
        most, longest, tokens = max(most, int(counts[row])), max(longest, int(own[row])), tokens + int(counts[row])
        if not found or (len(found[-1]) + 1) * most * longest > tokens * shared:
            found.append([])
            most, longest, tokens = int(counts[row]), int(own[row]), int(counts[row])
        found[-1].append(row)
    return [sorted(each) for each in found]


def _read_at(table: SlotTable, slot: int, length: int) -> torch.Tensor | slice:
    """Token slots of the first tokens of a slot."""
    slots = table.token_slots(int(slot), 0, int(length))
    first, count = int(slots[0]), len(slots)
    if int(slots[-1]) - first == count - 1 and bool((slots[1:] - slots[:-1] == 1).all()):
        return slice(first, first + count)
    return torch.from_numpy(slots)


def _by_length(tokens: NDArray[np.int64], lengths: Ints) -> tuple[list[int], list[slice | NDArray[np.int64]]]:
    """Tokens that are computed by themselves, and groups of those that are computed together.

    Each of a group is read as if it were as long as the longest, so one long one would cost as much as all that long.

    Args:
        lengths: how many tokens each of them sees.
    """
    if len(tokens) == 1:
        return tokens.tolist(), []
    longest = int(lengths.max(initial=0))
    if longest * len(lengths) - int(lengths.sum()) <= _PADDING:
        if len(tokens) and int(tokens[-1]) == len(tokens) - 1:
            return [], [slice(0, len(tokens))]
        return [], [tokens] if len(tokens) else []
    groups: list[list[int]] = []
    padding = longest = 0
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        padding += longest - length
        if not groups or padding > _PADDING:
            groups.append([])
            padding, longest = 0, length
        groups[-1].append(int(tokens[i]))
    alone = [group[0] for group in groups if len(group) == 1]
    return alone, [np.sort(np.array(group, dtype=np.int64)) for group in groups if len(group) > 1]


def _decode_group(
    table: SlotTable, tokens: slice | NDArray[np.int64], in_slots: Ints, lengths: NDArray[np.int64]
) -> DecodeGroup:
    """Tokens that are computed together.

    Args:
        in_slots, lengths: of each of them its slot, and how many of that it sees.
    """
    longest = int(lengths.max())
    size = table.page_size
    pages: Ints = table.pages[in_slots, : -(-longest // size)]
    if size > 1:
        slots = (pages[:, :, None] * size + np.arange(size)).astype(np.int32)
        pages = slots.reshape(len(lengths), -1)[:, :longest]
    ragged = bool((lengths != longest).any())
    if ragged:  # what is beyond a row's end may be anybody's: weighed with 0, but 0 x NaN is NaN
        pages = np.where(np.arange(longest) < lengths[:, None], pages, pages[:, :1])
    read_at = torch.from_numpy(np.ascontiguousarray(pages))
    places = tokens if isinstance(tokens, slice) else torch.from_numpy(tokens)
    return DecodeGroup(places, DecodeRows(read_at, torch.from_numpy(lengths.copy()), ragged))
