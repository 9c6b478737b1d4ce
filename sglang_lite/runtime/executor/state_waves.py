"""Splits a step's rows into waves, in which layers with a recurrent state compute them."""

from __future__ import annotations

import numpy as np
import torch

from sglang_lite.runtime.executor.step_record import StepRecord
from sglang_lite.runtime.kernels.state_rows import StateRows, StateWave
from sglang_lite.runtime.kv_cache.pages import Ints


def build_state_waves(record: StepRecord, device: torch.device) -> tuple[StateWave, ...]:
    """Returns the waves of a step, on a device; empty if the model has no states.

    A row is cut wherever a state inside it has to be kept. The first wave has the whole rows and
    the first parts of cut rows; each further wave has the next parts.
    """
    if not len(record.state_reads):
        return ()
    counts = record.ends - record.starts
    first: Ints = (np.cumsum(counts) - counts).astype(np.int32)  # of each row's tokens
    if not record.state_marks.shape[1]:
        rows = make_state_rows(counts, record.state_reads, record.state_writes, device)
        return (StateWave(rows),)
    parts = _cut_rows(record)
    waves = list[StateWave]()
    for number in range(max(map(len, parts))):
        of_wave = [(row, *cuts[number]) for row, cuts in enumerate(parts) if number < len(cuts)]
        row, start, end, read, write = (
            np.array(column, dtype=np.int32) for column in zip(*of_wave)
        )
        begin = first[row] + start - record.starts[row]
        tokens = np.concatenate([np.arange(b, b + n) for b, n in zip(begin, end - start)])
        rows = make_state_rows(end - start, read, write, device)
        waves.append(StateWave(rows, _as_slice_or_indices(tokens, device)))
    return tuple(waves)


def _as_slice_or_indices(tokens: Ints, device: torch.device) -> slice | torch.Tensor:
    """Returns ascending indices as a slice if they are consecutive: a slice is read without a copy,
    and written several times faster.
    """
    first = int(tokens[0])
    last = int(tokens[-1])
    if last - first + 1 == len(tokens):
        return slice(first, last + 1)
    return torch.from_numpy(tokens.astype(np.int64)).to(device)


def _cut_rows(record: StepRecord) -> list[list[tuple[int, int, int, int]]]:
    """Returns the parts of each row: start, end, and the places of the states before and after."""
    marks: list[list[tuple[int, int]]] = [[] for _ in record.slots]
    for row, end, place in record.state_marks.T.tolist():
        marks[row].append((end, place))
    parts = []
    for row, inside in enumerate(marks):
        start = int(record.starts[row])
        read = int(record.state_reads[row])
        cuts = []
        for end, write in (*inside, (int(record.ends[row]), int(record.state_writes[row]))):
            cuts.append((start, end, read, write))
            start = end
            read = write
        parts.append(cuts)
    return parts


def make_state_rows(counts: Ints, read: Ints, write: Ints, device: torch.device) -> StateRows:
    """Returns the rows of a wave, given their numbers of tokens and the places of their states."""
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    at, reads, writes = (
        torch.from_numpy(np.array(each, dtype=np.int32)).to(device)
        for each in (offsets, read, write)
    )
    return StateRows(at, reads, writes, int(counts.max()))
