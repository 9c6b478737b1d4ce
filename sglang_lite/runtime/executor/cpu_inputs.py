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
from sglang_lite.runtime.kv_cache.table import SlotTable
from sglang_lite.runtime.scheduler.batch import Batch

# Tokens that need not be read again, from which on rows that begin alike are computed together.
_SAVED_TOKENS = 4096
# Tokens that a group of decoding rows may read for nothing: about what another group takes.
_PADDING = 512


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
    # A batch of one is faster as a row by itself.
    together = batch.singles if batch.singles > 1 and not one_by_one else 0
    alone, several = _by_length(batch.ends[:together])
    extends: list[ExtendRow] = []
    for i in (*alone, *range(together, len(counts))):
        start, end = int(last[i] + 1 - counts[i]), int(last[i] + 1)
        read_at = table.token_slots(int(batch.slots[i]), 0, int(batch.ends[i]))
        if one_by_one:
            length = len(read_at) - (end - start) + 1
            extends += [ExtendRow(t, t + 1, _read_at(read_at[: length + t - start])) for t in range(start, end)]
        else:
            extends.append(ExtendRow(start, end, _read_at(read_at)))
    decode = tuple(_decode_group(batch, table, rows) for rows in several)
    groups = () if one_by_one else _groups(batch, table, together, extends[len(alone) :])
    return CpuInputs(
        ids=torch.from_numpy(ids.astype(np.int64)),
        positions=torch.from_numpy(positions.astype(np.int64)),
        plan=AttentionPlan(torch.from_numpy(store_at), decode, tuple(extends), groups),
        last=torch.from_numpy(last.astype(np.int64)),
    )


def _groups(batch: Batch, table: SlotTable, first: int, extends: list[ExtendRow]) -> tuple[ExtendGroup, ...]:
    """Rows from `first` on that begin in the same pages, of which enough is computed."""
    held = batch.starts[first:] // table.page_size
    if len(held) < 2 or int(held.sum()) * table.page_size < _SAVED_TOKENS:
        return ()
    groups = find_groups(table.pages[batch.slots[first:], : int(held.max())], held)
    return tuple(
        ExtendGroup(tuple(extends[row] for row in sorted(group.rows.tolist())), group.pages * table.page_size)
        for group in groups
        if (len(group.rows) - 1) * group.pages * table.page_size >= _SAVED_TOKENS
    )


def _read_at(slots: Ints) -> torch.Tensor | slice:
    first, count = int(slots[0]), len(slots)
    if int(slots[-1]) - first == count - 1 and bool((slots[1:] - slots[:-1] == 1).all()):
        return slice(first, first + count)
    return torch.from_numpy(slots)


def _by_length(lengths: Ints) -> tuple[list[int], list[slice | NDArray[np.int64]]]:
    """Decoding rows that are computed by themselves, and groups of those that are computed together.

    Each row of a group is read as if it were as long as the longest, so one long row would cost as much as all rows
    that long.
    """
    longest = int(lengths.max(initial=0))
    if longest * len(lengths) - int(lengths.sum()) <= _PADDING:
        return [], [slice(0, len(lengths))] if len(lengths) else []
    groups: list[list[int]] = []
    padding = longest = 0
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        padding += longest - length
        if not groups or padding > _PADDING:
            groups.append([])
            padding, longest = 0, length
        groups[-1].append(row)
    alone = [group[0] for group in groups if len(group) == 1]
    return alone, [np.sort(np.array(group, dtype=np.int64)) for group in groups if len(group) > 1]


def _decode_group(batch: Batch, table: SlotTable, rows: slice | NDArray[np.int64]) -> DecodeGroup:
    lengths = batch.ends[rows]
    longest = int(lengths.max())
    size = table.page_size
    pages: Ints = table.pages[batch.slots[rows], : -(-longest // size)]
    if size > 1:
        slots = (pages[:, :, None] * size + np.arange(size)).astype(np.int32)
        pages = slots.reshape(len(lengths), -1)[:, :longest]
    ragged = bool((lengths != longest).any())
    if ragged:  # what is beyond a row's end may be anybody's: weighed with 0, but 0 x NaN is NaN
        pages = np.where(np.arange(longest) < lengths[:, None], pages, pages[:, :1])
    read_at = torch.from_numpy(np.ascontiguousarray(pages))
    tokens = rows if isinstance(rows, slice) else torch.from_numpy(rows)
    return DecodeGroup(tokens, DecodeRows(read_at, torch.from_numpy(lengths.copy()), ragged))
