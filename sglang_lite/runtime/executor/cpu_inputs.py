"""Model inputs on a CPU: token ids, positions, and the cache slots that each row reads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.runtime.executor.prefix_groups import MIN_SAVED_TOKENS, find_groups
from sglang_lite.runtime.executor.state_waves import build_state_waves
from sglang_lite.runtime.executor.step_record import SlotPages, StepRecord
from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionPlan,
    DecodeGroup,
    DecodeRows,
    ExtendGroup,
    ExtendRow,
)
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.models.lora.cpu_step import CpuAdapters
from sglang_lite.runtime.models.lora.pool import COLUMN

# Padding tokens that a group of decoding rows may read: about the cost of one more group.
_PADDING = 512
# Token reads up to which a row with several new tokens is computed as that many decoding rows:
# about the cost of computing the row separately.
_MAX_DECODED_READS = 128


@dataclass(frozen=True, slots=True)
class CpuInputs:
    """Model inputs on a CPU for one record.

    Attributes:
        ids, positions: int64 [T], row by row; positions [3, T] if the record has `rotary`.
        plan: plan of the step's attention.
        last: int64 [rows], index of each row's last token.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    plan: AttentionPlan
    last: torch.Tensor


def build_cpu_inputs(
    record: StepRecord,
    table: SlotPages,
    last_tokens: Ints,
    adapters: CpuAdapters | None = None,
    *,
    one_by_one: bool = False,
) -> CpuInputs:
    """Returns the model's inputs for a step.

    Args:
        record: the step.
        table: pages of the slots.
        last_tokens: int32 [slots], last drawn token of each slot.
        adapters: adapters of the slots, if the engine has any.
        one_by_one: whether to compute each token's attention separately, so that it doesn't depend
            on the record.
    """
    ids = fill_in_drawn_ids(record, last_tokens)
    plan = _plan_attention(record, table, table, one_by_one=one_by_one)
    if table.windows is not None:
        plan = replace(
            plan, windowed=_plan_attention(record, table, table.windows, one_by_one=one_by_one)
        )
    if len(record.state_reads):
        plan = replace(plan, states=build_state_waves(record, torch.device("cpu")))
    if adapters is not None and record.changes_of(COLUMN).distinct:
        plan = replace(plan, lora=adapters.cpu_lora_step(record.token_slots))
    return CpuInputs(
        ids=torch.from_numpy(ids.astype(np.int64)),
        positions=torch.from_numpy(
            (record.rotary if record.rotary.size else record.positions).astype(np.int64)
        ),
        plan=plan,
        last=torch.from_numpy(record.last.astype(np.int64)),
    )


def fill_in_drawn_ids(record: StepRecord, last_tokens: Ints) -> Ints:
    """Returns the ids of a step's tokens, replacing -1 by the token last drawn in the slot."""
    return np.where(record.ids == -1, last_tokens[record.token_slots], record.ids)


def _plan_attention(
    record: StepRecord, table: SlotPages, read: SlotPages, *, one_by_one: bool
) -> AttentionPlan:
    """Returns the plan of a step's attention.

    Args:
        record: the step.
        table: pages of the slots, by which rows are grouped.
        read: pages that are written and read: the same, or those of layers with a window.
        one_by_one: as for `build_cpu_inputs`.
    """
    counts = record.ends - record.starts
    last = record.last
    positions = record.positions.astype(np.int64)
    slots = record.token_slots
    size = table.page_size
    store_at = read.pages[slots, positions // size].astype(np.int64) * size + positions % size
    first = last + 1 - counts
    lengths = positions + 1  # number of tokens that each token attends to
    both_ways = np.zeros(len(counts), dtype=bool)  # rows whose tokens attend to later ones
    if record.limits.size:
        lengths = record.limits.astype(np.int64)
        both_ways = np.logical_or.reduceat(lengths > positions + 1, first)
    groups: tuple[ExtendGroup, ...] = ()
    grouped = np.zeros(len(counts), dtype=bool)
    if not one_by_one:
        groups, grouped = _group_by_prefix(record, table, read, first, last, ~both_ways)
    # A batch of one decoding row is faster as an extend row than as a group.
    singles = np.arange(record.singles if record.singles > 1 and not one_by_one else 0)
    extends = list[ExtendRow]()
    for i in range(len(singles), len(counts)):
        if not grouped[i]:
            limits = torch.from_numpy(lengths[first[i] : last[i] + 1]) if both_ways[i] else None
            read_at = _token_slots_of(read, record.slots[i], record.ends[i])
            extends.append(ExtendRow(int(first[i]), int(last[i]) + 1, read_at, limits))
    decode_groups: list[slice | NDArray[np.int64]] = []
    if one_by_one:
        # every token becomes an extend row
        separate = list(range(len(record.ids)))
        extends = []
    else:
        short_rows = {} if len(record.slots) == 1 else _find_short_rows(extends)
        extends = [row for row in extends if row.start not in short_rows]
        at = np.concatenate(
            [
                singles[~grouped[singles]],
                *(np.arange(start, end) for start, end in short_rows.items()),
            ]
        )
        separate, decode_groups = _group_by_length(at, lengths[at])
    extends += [
        _one_token_row(read, t, slots[t], lengths[t], lengths[t] - positions[t] - 1)
        for t in separate
    ]
    extends += [row for group in groups for row in group.rows]
    return AttentionPlan(
        torch.from_numpy(store_at),
        tuple(
            _decode_group(read, tokens, slots[tokens], lengths[tokens]) for tokens in decode_groups
        ),
        tuple(extends),
        groups,
        both_ways=bool(both_ways.any()),
    )


def _one_token_row(read: SlotPages, token: int, slot: int, length: int, behind: int) -> ExtendRow:
    """Returns a row for one token of the record. The token attends to the first `length` positions
    of its slot, including `behind` positions after itself.
    """
    limits = torch.tensor([length]) if behind else None
    return ExtendRow(token, token + 1, _token_slots_of(read, slot, length), limits, int(behind))


def _find_short_rows(extends: list[ExtendRow]) -> dict[int, int]:
    """Finds the rows that read few enough tokens to be computed one token at a time, like decoding
    rows. Returns a map from each row's first token to its end.

    Each token still sees the earlier tokens of its row, since all keys and values are stored before
    any are read.
    """
    return {
        row.start: row.end
        for row in extends
        if (row.end - row.start) * row.length <= _MAX_DECODED_READS and row.limits is None
    }


def _group_by_prefix(
    record: StepRecord,
    table: SlotPages,
    read: SlotPages,
    first: Ints,
    last: Ints,
    may: NDArray[np.bool_],
) -> tuple[tuple[ExtendGroup, ...], NDArray[np.bool_]]:
    """Groups rows that begin with the same pages, if sharing these pages saves enough reads.
    Returns the groups, and a mask, bool [rows], that is True for the rows in a group.

    Args:
        record, table, read: as for `_plan_attention`.
        first, last: index of each row's first and last token in the record.
        may: rows that may be in a group.
    """
    grouped = np.zeros(len(first), dtype=bool)
    shareable_pages = record.starts // table.page_size * may
    if len(shareable_pages) < 2 or int(shareable_pages.sum()) * table.page_size < MIN_SAVED_TOKENS:
        return (), grouped
    groups = []
    for group in find_groups(
        table.pages[record.slots, : int(shareable_pages.max())], shareable_pages
    ):
        shared = group.pages * table.page_size
        for rows in _split_by_size(group.rows, last + 1 - first, record.ends - shared, shared):
            if (len(rows) - 1) * shared < MIN_SAVED_TOKENS:
                continue
            grouped[rows] = True
            groups.append(
                ExtendGroup.from_rows(
                    tuple(
                        ExtendRow(
                            int(first[i]),
                            int(last[i]) + 1,
                            _token_slots_of(read, record.slots[i], record.ends[i]),
                        )
                        for i in rows
                    ),
                    shared,
                )
            )
    return tuple(groups), grouped


def _split_by_size(rows: Ints, counts: Ints, own: Ints, shared: int) -> list[list[int]]:
    """Splits a group of rows into smaller groups, if padding all rows to one size would cost more
    than sharing the prefix saves.

    Args:
        rows: rows of the group.
        counts: number of new tokens of each row of the record.
        own: number of tokens after the shared prefix that each row of the record reads.
        shared: number of tokens in the shared prefix.
    """
    found: list[list[int]] = []
    max_new = longest = tokens = 0
    for row in sorted(rows.tolist(), key=lambda row: -int(counts[row]) * int(own[row])):
        max_new = max(max_new, int(counts[row]))
        longest = max(longest, int(own[row]))
        tokens = tokens + int(counts[row])
        if not found or (len(found[-1]) + 1) * max_new * longest > tokens * shared:
            found.append([])
            max_new = int(counts[row])
            longest = int(own[row])
            tokens = int(counts[row])
        found[-1].append(row)
    return [sorted(each) for each in found]


def _token_slots_of(table: SlotPages, slot: int, length: int) -> torch.Tensor | slice:
    """Returns the token slots of a slot's first `length` tokens, as a slice if they are contiguous
    and in order.
    """
    slots = table.token_slots(int(slot), 0, int(length))
    first = int(slots[0])
    count = len(slots)
    if int(slots[-1]) - first == count - 1 and bool((slots[1:] - slots[:-1] == 1).all()):
        return slice(first, first + count)
    return torch.from_numpy(slots)


def _group_by_length(
    tokens: NDArray[np.int64], lengths: Ints
) -> tuple[list[int], list[slice | NDArray[np.int64]]]:
    """Divides tokens into those that are computed separately and groups that are computed together.

    Every token of a group reads as many tokens as the longest, so a long row in a group of short
    ones would be expensive.

    Args:
        tokens: indices of tokens of the record.
        lengths: number of tokens that each token attends to.
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
            padding = 0
            longest = length
        groups[-1].append(int(tokens[i]))
    separate = [group[0] for group in groups if len(group) == 1]
    return separate, [
        np.sort(np.array(group, dtype=np.int64)) for group in groups if len(group) > 1
    ]


def _decode_group(
    table: SlotPages, tokens: slice | NDArray[np.int64], in_slots: Ints, lengths: NDArray[np.int64]
) -> DecodeGroup:
    """Returns a `DecodeGroup` of tokens that are computed together.

    Args:
        tokens: indices of the tokens in the record.
        in_slots: slot of each token.
        lengths: number of tokens of its slot that each token attends to.
    """
    longest = int(lengths.max())
    size = table.page_size
    pages: Ints = table.pages[in_slots, : -(-longest // size)]
    if size > 1:
        slots = (pages[:, :, None] * size + np.arange(size)).astype(np.int32)
        pages = slots.reshape(len(lengths), -1)[:, :longest]
    ragged = bool((lengths != longest).any())
    if ragged:  # slots beyond a row's end may hold NaN, and 0 x NaN is NaN
        pages = np.where(np.arange(longest) < lengths[:, None], pages, pages[:, :1])
    read_at = torch.from_numpy(np.ascontiguousarray(pages))
    places = tokens if isinstance(tokens, slice) else torch.from_numpy(tokens)
    return DecodeGroup(places, DecodeRows(read_at, torch.from_numpy(lengths.copy()), ragged))
