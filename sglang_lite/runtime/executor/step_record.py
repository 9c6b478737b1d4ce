"""A step as a record: everything that a device needs for the forward of a step, as plain arrays.

The step loop writes records from its slot table, and a runner executes them. A runner knows slots
only from records, so the same records, executed in the same order, give the same keys and values on
any device: in another process, on several devices in parallel, or from a file. Weights of adapters
and features of images are sent to a device separately, and draws are given to `sample`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_lite.protocol import ParameterError
from sglang_lite.runtime.capacity import Capacity
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.kv_cache.state_pages import RowStates
from sglang_lite.runtime.kv_cache.window_pages import WindowPages
from sglang_lite.runtime.requests.request import Request, WatchedTokens
from sglang_lite.runtime.requests.resolved_params import ResolvedParams
from sglang_lite.runtime.scheduler.batch import Batch

# as int: comparing an array with a member of an enumeration is slow
_TEXT = int(WatchedTokens.TEXT)

# Parameters of one slot that every draw needs, in the order of `sampling_row`. A temperature of 0
# is greedy. The parameters after the seed have four bytes each, as on a device (`gpu_slots.py`). So
# a new parameter has to be added only here and where a draw uses it.
SAMPLING = np.dtype(
    [
        ("seed", np.uint64),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("sequential", np.int32),
    ]
)


_LENGTH = 8  # bytes of a record's length in a file
_UNKNOWN = -2  # stands for a value that the device may not have yet
_NO_SAMPLING: NDArray[np.void] = np.zeros(0, dtype=SAMPLING)
_NOTHING: Ints = np.zeros(0, dtype=np.int32)
_NO_ROTARY: Ints = np.zeros((3, 0), dtype=np.int32)
_NO_COPIES: Ints = np.zeros((2, 0), dtype=np.int32)
_NO_MARKS: Ints = np.zeros((3, 0), dtype=np.int32)


def sampling_row(params: ResolvedParams, seed: int) -> tuple[int, float, int, float, float, bool]:
    """Returns a request's sampling parameters as one element of a SAMPLING array."""
    temperature = 0.0 if params.greedy else params.temperature
    return (
        seed % 2**64,
        temperature,
        max(params.top_k, 0),
        params.top_p,
        params.min_p,
        params.sequential,
    )


class PromptScores(msgspec.Struct, frozen=True):
    """Prompt tokens whose log-probabilities a step computes.

    Attributes:
        row: row of the step.
        first: position of the first token.
        tokens: ids of the tokens, int32 [N].
        tops: number of likeliest tokens that are reported at each position.
        requested: ids whose log-probabilities are reported at each position.
    """

    row: int
    first: int
    tokens: Ints
    tops: int
    requested: tuple[int, ...]


class ColumnChanges(msgspec.Struct, frozen=True):
    """What has changed in a column of the slot table.

    Attributes:
        slots: int32 [C], slots whose value has changed.
        values: int32 [C], their values; -1 for none.
        distinct: number of different values of the step's rows, without -1.
    """

    slots: Ints
    values: Ints
    distinct: int


NO_CHANGES = ColumnChanges(_NOTHING, _NOTHING, 0)


class RecordColumn(Protocol):
    """Column of the slot table that is also sent to runners, such as the adapter of each request."""

    name: str

    def column_values(self, batch: Batch) -> Ints:
        """Returns the value of each row, int32 [R]: a number from 0 on, or -1 for none."""
        ...


class TokenReplacer(Protocol):
    """Replaces prompt tokens that stand for something outside the vocabulary, such as an image."""

    def replace_tokens(
        self, batch: Batch, ends: Ints, ids: Ints, positions: Ints
    ) -> tuple[Ints, Ints]:
        """Replaces ids in place. Returns `StepRecord.rotary` and `limits`.

        Args:
            batch: the step's rows.
            ends: int32 [R], ends of the rows, including drafts.
            ids: int32 [T], ids of the step's tokens.
            positions: int32 [T], their positions.
        """
        ...


class StepRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of the forward of one step, with R rows and T tokens. Rows are in the order of `Batch`.
    The serialised form omits fields that have their default values, as most do in most steps.

    Attributes:
        step: number of the step.
        slots: int32 [R], slot of each row.
        epochs: int32 [R], changed whenever a slot gets another sequence.
        starts, ends: int32 [R], positions start … end-1 to compute in each row, including those of
            drafts.
        decoding: number of decoding rows without drafts.
        singles: number of rows that compute one token, including the decoding rows.
        ids: int32 [T], row by row; -1 for the token that was drawn last in the row's slot, -2 - r
            for row r of the model's table of ready embeddings.
        positions: int32 [T].
        copies: int32 [2, C], source and destination token slots to copy before anything else.
        page_indices: int32 [K], changed entries of the flattened page table [slots, pages of a
            slot].
        pages: int32 [K], the new pages of these entries.
        started: int32 [S], slots whose sampling parameters have changed.
        sampling: SAMPLING [S], these parameters.
        scores: prompt tokens to score.
        streams: number of decoding rows of requests that stream.
        watched: True if the host inspects new tokens of a row, so that the draws may have to wait
            for its masks.
        window_indices, window_pages: like `page_indices` and `pages`, in the page table of the
            layers with a window.
        window_copies: like `copies`, in these layers.
        columns: what has changed in other columns of the slot table, by name.
        rotary: int32 [3, T], time, row and column for rotating each token; [3, 0] if all three are
            its position.
        limits: int32 [T], number of tokens that each token attends to; [0] if each attends to those
            up to itself.
        state_reads: int32 [R], place of the state that each row begins with, -1 for an empty one;
            [0] if the model has no states.
        state_writes: int32 [R], place for the state after each row's last token; [0] if the model
            has no states.
        state_marks: int32 [3, M], row, end and place of each state to write inside a row: the state
            after the row's token at position end - 1. In order within each row.
    """

    step: int
    slots: Ints
    epochs: Ints
    starts: Ints
    ends: Ints
    decoding: int
    singles: int
    ids: Ints
    positions: Ints
    copies: Ints
    page_indices: Ints
    pages: Ints
    started: Ints
    sampling: NDArray[np.void]
    scores: tuple[PromptScores, ...] = ()
    streams: int = 0
    watched: bool = False
    window_indices: Ints = _NOTHING
    window_pages: Ints = _NOTHING
    window_copies: Ints = _NO_COPIES
    columns: dict[str, ColumnChanges] = {}
    rotary: Ints = _NO_ROTARY
    limits: Ints = _NOTHING
    state_reads: Ints = _NOTHING
    state_writes: Ints = _NOTHING
    state_marks: Ints = _NO_MARKS

    @property
    def token_slots(self) -> Ints:
        """Slot of each token, int32 [T]."""
        return (
            self.slots
            if len(self.ids) == len(self.slots)
            else np.repeat(self.slots, self.ends - self.starts)
        )

    def changes_of(self, column: str) -> ColumnChanges:
        """Returns what has changed in a column. Returns no changes if the engine doesn't have the
        column.
        """
        return self.columns.get(column, NO_CHANGES)

    @property
    def has_ready_embeddings(self) -> bool:
        """True if some token's embedding comes from the model's table of ready embeddings, such as
        those of images.
        """
        return self.decoding < len(self.slots) and int(self.ids.min()) < -1

    @property
    def last(self) -> Ints:
        """Index of each row's last token, int32 [R]."""
        return np.cumsum(self.ends - self.starts, dtype=np.int32) - np.int32(1)


class SlotPages:
    """Pages of each slot, according to the records so far.

    Args:
        slots: maximum number of running requests.
        longest: longest sequence in tokens.
        page_size: tokens in a page.
        windows: whether layers with a window have separate pages.

    Attributes:
        longest, page_size: the arguments of these names.
        pages: int32 [slots, pages of longest + 1 tokens].
        windows: the pages of the layers with a window, or None.
    """

    def __init__(self, slots: int, longest: int, page_size: int, *, windows: bool = False) -> None:
        self.longest = longest
        self.page_size = page_size
        self.pages: Ints = np.zeros((slots, -(-(longest + 1) // page_size)), dtype=np.int32)
        self.windows = SlotPages(slots, longest, page_size) if windows else None

    def apply_record(self, record: StepRecord) -> None:
        """Applies the changes of a record."""
        self.pages.reshape(-1)[record.page_indices] = record.pages
        if self.windows is not None:
            self.windows.pages.reshape(-1)[record.window_indices] = record.window_pages

    def token_slots(self, slot: int, start: int, end: int) -> Ints:
        """Returns the token slots of positions start … end-1 in the KV cache."""
        positions = np.arange(start, end, dtype=np.int32)
        slots: Ints = (
            self.pages[slot, positions // self.page_size] * self.page_size
            + positions % self.page_size
        )
        return slots


class StepWriter:
    """Writes the records of successive steps. A record contains only what has changed since the
    previous one.

    Args:
        table: slot table that batches refer to.
        windows: pages of the layers with a window, if they have separate pages.
        file: file to which each record is appended when it is written. If a step fails, its record
            is the last one. None for no file.
        columns: columns of the table that runners know.
        replacer: replaces tokens of prompts; None if all prompt tokens are in the vocabulary.
    """

    def __init__(
        self,
        table: SlotTable,
        windows: WindowPages | None = None,
        file: Path | None = None,
        *,
        columns: Sequence[RecordColumn] = (),
        replacer: TokenReplacer | None = None,
    ) -> None:
        self._table = table
        self._windows = windows
        self._file = file
        self._written: Ints = np.zeros_like(table.pages)  # pages according to the records so far
        self._windows_written = None if windows is None else np.zeros_like(table.pages)
        self._replacer = replacer
        # values according to the records so far
        self._columns = [
            (column, np.full(len(table.pages), -1, dtype=np.int32)) for column in columns
        ]

    def forget_written_state(self) -> None:
        """Makes the next records repeat all pages and columns, because the last one was not
        completely executed.
        """
        self._written.fill(-1)
        for _, written in self._columns:
            written.fill(_UNKNOWN)
        if self._windows_written is not None:
            self._windows_written.fill(-1)

    def write_record(self, batch: Batch) -> StepRecord:
        """Returns the record of a batch."""
        table = self._table
        slots = batch.slots
        started = batch.started
        ends = batch.ends + batch.draft_counts if batch.drafts else batch.ends
        if batch.singles == len(slots):
            positions = batch.starts
            ids = np.where(batch.pending, -1, table.tokens[slots, positions]).astype(np.int32)
        else:
            counts = ends - batch.starts
            last = np.cumsum(counts) - 1
            rows = np.repeat(np.arange(len(counts)), counts)
            offsets = np.repeat(batch.starts + counts - 1 - last, counts)
            positions = (np.arange(len(rows)) + offsets).astype(np.int32)
            ids = table.tokens[slots[rows], positions]
            ids[last[batch.pending]] = -1
        rotary = _NO_ROTARY
        limits = _NOTHING
        if self._replacer is not None:
            rotary, limits = self._replacer.replace_tokens(batch, ends, ids, positions)
        page_count = int(table.page_count[slots].max())
        now: Ints = table.pages[slots, :page_count]
        page_indices, pages = _find_changes(self._written, slots, now)
        window_indices = window_pages = _NOTHING
        if self._windows is not None and self._windows_written is not None:
            window_indices, window_pages = _find_changes(
                self._windows_written, slots, self._windows.of[now]
            )
        record = StepRecord(
            step=batch.step,
            slots=slots,
            epochs=batch.epochs,
            starts=batch.starts,
            ends=ends,
            decoding=batch.decoding,
            singles=batch.singles,
            ids=ids,
            positions=positions,
            copies=batch.copies,
            page_indices=page_indices,
            pages=pages,
            started=np.array([each.slot for each in started], dtype=np.int32)
            if started
            else _NOTHING,
            sampling=_build_sampling_rows(started) if started else _NO_SAMPLING,
            scores=tuple(self._iterate_prompt_scores(batch)) if batch.decoding < len(slots) else (),
            streams=batch.streams,
            watched=bool((table.watched[slots] >= _TEXT).any()),
            window_indices=window_indices,
            window_pages=window_pages,
            window_copies=batch.window_copies,
            columns={
                column.name: _find_column_changes(column, written, batch)
                for column, written in self._columns
            },
            rotary=rotary,
            limits=limits,
            **({} if batch.states is None else _state_fields(batch.states)),
        )
        if self._file is not None:
            append_step(self._file, record)
        return record

    def _iterate_prompt_scores(self, batch: Batch) -> Iterator[PromptScores]:
        """Yields the prompt tokens whose log-probabilities are requested and whose logits this step
        computes. Decoding rows have no such tokens.
        """
        for i, request in enumerate(batch.requests[batch.decoding :], batch.decoding):
            if request.score_from is not None:
                # the state at p - 1 predicts the token at p
                first = max(request.score_from, int(batch.starts[i]) + 1)
                stop = min(int(batch.ends[i]) + 1, request.prompt_len)
                if first < stop:
                    yield _prompt_scores(
                        request, i, first, self._table.tokens[batch.slots[i], first:stop]
                    )


def _find_changes(written: Ints, slots: Ints, now: Ints) -> tuple[Ints, Ints]:
    """Returns the indices of the changed entries in a flattened page table [slots, pages], and the
    new pages of these entries.

    Args:
        written: pages according to the records so far; updated in place.
        slots: int32 [R], slots of the rows.
        now: int32 [R, pages], their first pages.
    """
    row, page = (now != written[slots, : now.shape[1]]).nonzero()
    if not len(row):
        return _NOTHING, _NOTHING
    pages: Ints = now[row, page]
    indices: Ints = slots[row] * np.int32(written.shape[1]) + page.astype(np.int32)
    written.reshape(-1)[indices] = pages
    return indices, pages


def _find_column_changes(column: RecordColumn, written: Ints, batch: Batch) -> ColumnChanges:
    """Returns what has changed in a column. Slots that have just got a request count as changed.

    Args:
        column: the column.
        written: its values according to the records so far; updated in place.
        batch: rows of the step.
    """
    written[[each.slot for each in batch.started]] = _UNKNOWN
    values = column.column_values(batch)
    changed = values != written[batch.slots]
    written[batch.slots] = values
    distinct = len({*values.tolist()} - {-1})
    if not changed.any():
        return ColumnChanges(_NOTHING, _NOTHING, distinct)
    return ColumnChanges(batch.slots[changed], values[changed], distinct)


def _state_fields(states: RowStates) -> dict[str, Ints]:
    """Returns the fields of a record that say where the states of its rows are."""
    marks = [(mark.row, mark.end, mark.place) for mark in states.marks]
    return {
        "state_reads": states.read,
        "state_writes": states.write,
        "state_marks": np.array(marks, dtype=np.int32).T if marks else _NO_MARKS,
    }


def _build_sampling_rows(requests: Sequence[Request]) -> NDArray[np.void]:
    return np.array([sampling_row(each.params, each.seed) for each in requests], dtype=SAMPLING)


def _prompt_scores(request: Request, row: int, first: int, tokens: Ints) -> PromptScores:
    params = request.params
    return PromptScores(
        row, first, tokens.copy(), params.top_logprobs_num, params.token_ids_logprob
    )


# -------------------------------------------------------------------------------------------- files


def append_step(file: Path, record: StepRecord | Capacity) -> None:
    """Appends a step to a file that records an engine's steps. The engine's capacity comes first in
    the file. Raises OSError if the file can't be written.
    """
    content = _ENCODER.encode(record)
    with file.open("ab") as steps:
        steps.write(len(content).to_bytes(_LENGTH, "big") + content)


def read_steps(path: Path) -> tuple[Capacity, list[StepRecord]]:
    """Reads an engine's capacity and steps from a file. Leaves out the last step if it is
    incomplete.

    Raises:
        ParameterError: the file has another format or can't be read.
    """
    try:
        content = path.read_bytes()
        parts = list[bytes]()
        at = _LENGTH
        while at <= len(content):
            size = int.from_bytes(content[at - _LENGTH : at], "big")
            parts.append(content[at : at + size])
            at += size + _LENGTH
        if parts and at - _LENGTH > len(content):
            parts.pop()
        first, *rest = parts
        return msgspec.msgpack.decode(first, type=Capacity), list(map(_DECODER.decode, rest))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        hint = "debug_tensor_dump_output_folder makes files of steps."
        raise ParameterError("steps", f"{path} is none: {error}.", hint=hint) from error


def array_to_data(array: object) -> object:
    """Converts an array of int32 or SAMPLING to a form that msgspec can serialise."""
    assert isinstance(array, np.ndarray)
    sampling = array.dtype == SAMPLING
    return sampling, array.shape, array.tobytes()


def array_from_data(_: type, data: tuple[bool, list[int], bytes]) -> NDArray[np.generic]:
    """Restores an array from the data that `array_to_data` returned."""
    sampling, shape, content = data
    return np.frombuffer(content, dtype=SAMPLING if sampling else np.int32).reshape(shape)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=array_to_data)
_DECODER = msgspec.msgpack.Decoder(StepRecord, dec_hook=array_from_data)
