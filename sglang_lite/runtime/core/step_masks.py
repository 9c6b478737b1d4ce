"""Token masks of a step. Selects the rows for which the step draws tokens, makes masks from their
grammars, and builds the other inputs of the draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.core.token_watch import DRAWS, GRAMMAR
from sglang_lite.runtime.drafting.draft import Draft
from sglang_lite.runtime.executor.logit_adjustments import DrawAdjustments
from sglang_lite.runtime.executor.sampler import Draws, Masks
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.scheduler.batch import Batch
from sglang_lite.runtime.scheduler.scheduler import Scheduler
from sglang_lite.runtime.structured_output.base import Mask, Matcher
from sglang_lite.runtime.structured_output.mask_filler import MaskFiller
from sglang_lite.runtime.structured_output.timings import Durations


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Draws of a step: the rows in which it draws tokens, and the masks for them.

    Attributes:
        rows: row of each draw, int64 [D]. Draws after drafts come last.
        offsets: number of drafted tokens before each draw, int32 [D].
        masks: masks of the draws; None if no draw has one.
        filling: time spent making the masks, in seconds.
    """

    rows: NDArray[np.int64]
    offsets: Ints
    masks: Masks | None
    filling: float


class _SharedMasks:
    """Masks of a step. Rows in the same state of a grammar share a mask, which is written and sent
    only once.

    Args:
        words: int32 [rows, ceil(V / 32)], memory to write to.
        rows: number of rows with a mask.

    Attributes:
        places: int32 [rows], index of each row's mask in `words`; -1 if it is not known.
    """

    def __init__(self, words: NDArray[np.int32], rows: int) -> None:
        self._words = words
        self.places = np.full(rows, -1, dtype=np.int32)
        self._count = 0
        # index in `words` by id of a mask; the mask is kept here, so that its id stays valid
        self._known: dict[int, tuple[int, Mask]] = {}

    def set_row_mask(self, row: int, mask: Mask) -> None:
        """Sets the mask of a row. A mask that another row already has is not stored again."""
        place, _ = self._known.setdefault(id(mask), (len(self._known), mask))
        if place == self._count:
            self._words[place] = mask
            self._count += 1
        self.places[row] = place

    def rows_allowing_nothing(self, first: int) -> list[int]:
        """Returns the rows, starting at `first`, whose mask allows no token. This happens if the
        grammar engine of a row has failed.
        """
        places = self.places[first:]
        nothing = np.bitwise_or.reduce(self.written, axis=1) == 0
        return (
            (first + np.flatnonzero((places >= 0) & nothing[places])).tolist()
            if nothing.any()
            else []
        )

    @property
    def written(self) -> NDArray[np.int32]:
        """The distinct masks."""
        return self._words[: self._count]


class StepMasks:
    """Makes the masks of steps, one step at a time.

    Args:
        scheduler: scheduler of the steps.
        filler: threads that make masks.
        words: int32 [slots, ceil(V / 32)], memory for the masks of the step that is about to draw.
        has_other_work: whether the loop has other work while it waits for masks.

    Attributes:
        late: number of rows delayed by a step because their masks were late.
        times: durations of making the masks of a step.
        waits: how long the device waited for masks and other work of the host.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        filler: MaskFiller,
        words: NDArray[np.int32],
        has_other_work: Callable[[], bool],
    ) -> None:
        self._scheduler = scheduler
        self._filler = filler
        self._words = words
        self._has_other_work = has_other_work
        self.late = 0
        self.times = Durations()
        self.waits = Durations()

    def make_masks(self, batch: Batch, patience: float) -> MaskedRows:
        """Makes the masks of the tokens that a step draws.

        Rows whose masks are late are left out, and their last token is computed again in the next
        step. A draw after drafted tokens is simply left out if its mask is late.

        Args:
            batch: rows of the step.
            patience: maximum time to wait for masks, in seconds.
        """
        rows = (batch.draws & self._scheduler.mask_unchanged_rows(batch)).nonzero()[0]
        watched = (
            (self._scheduler.store.table.watched[batch.slots[rows]] >= GRAMMAR)
            .nonzero()[0]
            .tolist()
        )
        matchers: list[Matcher] = []
        masked: list[int] = []
        for i, row in zip(watched, rows[watched].tolist()):
            matcher = batch.requests[row].output.matcher
            if matcher is not None:
                matcher.busy = False
                masked.append(i)
                matchers.append(matcher)
        undrafted = len(rows)
        own = len(matchers)
        rows, offsets = (
            (rows, np.zeros(len(rows), dtype=np.int32))
            if not batch.drafts
            else _append_draft_draws(batch, rows)
        )
        if matchers and len(rows) > undrafted:
            places = range(undrafted, len(rows))
            ahead = [
                m
                for row in dict.fromkeys(rows[undrafted:].tolist())
                for m in _draft_matchers(batch.drafts[row])
            ]
            masked += [
                place for place, matcher in zip(places, ahead, strict=True) if matcher is not None
            ]
            matchers += [matcher for matcher in ahead if matcher is not None]
        if not matchers:
            return MaskedRows(rows, offsets, None, 0.0)
        began = time.perf_counter()
        shared = _SharedMasks(self._words, len(matchers))
        late = self._filler.fill(
            matchers,
            shared.set_row_mask,
            patience=patience,
            has_unmasked_rows=own < len(batch.slots),  # a chunk of a prompt is computed as well
            has_other_work=self._has_other_work,
        )
        filling = time.perf_counter() - began
        which = np.full(len(rows), -1, dtype=np.int32)
        which[masked] = shared.places
        if len(matchers) > own:
            late += shared.rows_allowing_nothing(own)
        if late:
            missing = np.array(masked)[late]
            again = missing[missing < undrafted]
            self.late += len(again)
            self._scheduler.schedule_last_token_recompute(batch.slots[rows[again]])
            for row in rows[again].tolist():
                if (matcher := batch.requests[row].output.matcher) is not None:
                    matcher.busy = True
            rows = np.delete(rows, missing)
            offsets = np.delete(offsets, missing)
            which = np.delete(which, missing)
        return MaskedRows(rows, offsets, Masks(shared.written, which), filling)

    def record_mask_times(self, drawn: MaskedRows, waited: float | None) -> None:
        """Records how long a step's masks took to make, and how long the device waited for them.
        `waited` is None if that was not measured.
        """
        if drawn.filling:
            self.times.add_duration(drawn.filling)
            if waited is not None:
                self.waits.add_duration(waited)

    def close(self) -> None:
        """Ends the threads, and releases the memory of the masks, which is pinned on a GPU."""
        self._words = self._words[:0].copy()
        self._filler.close()


def _append_draft_draws(batch: Batch, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], Ints]:
    """Returns the row of each draw, and the number of drafted tokens before the draw. The draws
    without drafted tokens before them come first, one for each of `rows`.
    """
    ahead = [
        (row, offset)
        for row in rows.tolist()
        if row in batch.drafts
        for offset in batch.drafts[row].drawn
    ]
    after, offsets = zip(*ahead) if ahead else ((), ())
    counts: Ints = np.array((*[0] * len(rows), *offsets), dtype=np.int32)
    return np.concatenate((rows, np.array(after, dtype=np.int64))), counts


def _draft_matchers(draft: Draft) -> Sequence[Matcher | None]:
    """Returns the grammar's matcher for each draw after drafted tokens. Without a grammar, each is
    None.
    """
    return draft.matchers or [None] * len(draft.drawn)


def build_draws(
    batch: Batch, drawn: MaskedRows, table: SlotTable, eos_ids: frozenset[int]
) -> Draws:
    """Returns what a runner needs to draw a step's tokens: rows, masks and sampling adjustments."""
    rows = drawn.rows
    behind = batch.draft_counts[rows] - drawn.offsets if batch.drafts else None
    return Draws(
        rows,
        _draw_adjustments(batch, drawn, table, eos_ids),
        drawn.masks,
        table.scored[batch.slots[rows]],
        behind,
    )


def _draw_adjustments(
    batch: Batch, drawn: MaskedRows, table: SlotTable, eos_ids: frozenset[int]
) -> dict[int, DrawAdjustments]:
    """Returns adjustments for draws that need more than the sampling table and masks, by index into
    `drawn.rows`.
    """
    found: dict[int, DrawAdjustments] = {}
    rows = drawn.rows
    which = (table.watched[batch.slots[rows]] == DRAWS).nonzero()[0]
    for i, row, offset in zip(which.tolist(), rows[which].tolist(), drawn.offsets[which].tolist()):
        request = batch.requests[row]
        tokens = table.tokens[request.slot, : table.length[request.slot] + offset]
        params = request.params
        early = len(tokens) - request.prompt_len < params.min_tokens
        # even with ignore_eos, as in SGLang
        banned = tuple(request.output.ends | eos_ids) if early else ()
        words = request.bad_words
        avoided = () if words is None else words.find_endings(tokens[request.prompt_len :])
        found[i] = DrawAdjustments(
            params, tokens, request.prompt_len, banned, request.processor, avoided
        )
    return found
