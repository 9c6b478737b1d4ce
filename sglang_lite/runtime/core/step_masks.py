"""Token masks of a step: which rows it draws for, and what their grammars allow; and what else its draws need."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.core.token_watch import DRAWS, GRAMMAR
from sglang_lite.runtime.executor.logit_adjustments import DrawAdjustments
from sglang_lite.runtime.executor.sampler import Masks
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.scheduler.batch import Batch
from sglang_lite.runtime.scheduler.scheduler import Scheduler
from sglang_lite.runtime.structured_output.base import Mask, Matcher
from sglang_lite.runtime.structured_output.mask_filler import MaskFiller


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """Rows that a step draws tokens for, with their masks and the time that making them took, in seconds."""

    rows: NDArray[np.int64]
    masks: Masks | None
    filling: float


class _SharedMasks:
    """Masks of a step. Rows in the same state of a grammar share one, which is written and sent once.

    Args:
        words: int32 [rows, ceil(V / 32)], memory to write to.
        rows: number of rows with a mask.

    Attributes:
        places: int32 [rows], index of each row's mask in `words`; -1 if it is not known.
    """

    def __init__(self, words: NDArray[np.int32], rows: int) -> None:
        self._words, self.places, self._count = words, np.full(rows, -1, dtype=np.int32), 0
        self._known: dict[int, tuple[int, Mask]] = {}  # place by id of a mask, which keeps its id as long as it is here

    def put(self, row: int, mask: Mask) -> None:
        """Sets the mask of a row."""
        place, _ = self._known.setdefault(id(mask), (len(self._known), mask))
        if place == self._count:
            self._words[place] = mask
            self._count += 1
        self.places[row] = place

    @property
    def written(self) -> NDArray[np.int32]:
        """The different masks."""
        return self._words[: self._count]


class StepMasks:
    """Makes the masks of steps, one step at a time.

    Args:
        scheduler: scheduler of the steps.
        filler: threads that make masks.
        words: int32 [slots, ceil(V / 32)], memory for the masks of the step that is about to draw.
        has_other_work: whether the loop has other work while it waits for masks.

    Attributes:
        late: number of rows that continued a step later because their masks were late.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        filler: MaskFiller,
        words: NDArray[np.int32],
        has_other_work: Callable[[], bool],
    ) -> None:
        self._scheduler, self._filler, self._words, self._has_other_work = scheduler, filler, words, has_other_work
        self.late = 0

    def make(self, batch: Batch, patience: float) -> MaskedRows:
        """Makes the masks of the rows that a step draws for. Rows whose masks are late are left out: their last token
        is computed again in the next step.

        Args:
            batch: rows of the step.
            patience: maximum time to wait for masks, in seconds.
        """
        rows = (batch.draws & self._scheduler.live(batch)).nonzero()[0]
        watched = (self._scheduler.store.table.watched[batch.slots[rows]] >= GRAMMAR).nonzero()[0].tolist()
        matchers: list[Matcher] = []
        masked: list[int] = []
        for i, row in zip(watched, rows[watched].tolist()):
            matcher = batch.requests[row].output.matcher
            if matcher is not None:
                masked.append(i)
                matchers.append(matcher)
        if not matchers:
            return MaskedRows(rows, None, 0.0)
        began, shared = time.perf_counter(), _SharedMasks(self._words, len(matchers))
        late = self._filler.fill(
            matchers,
            shared.put,
            patience=patience,
            has_unmasked_rows=len(masked) < len(batch.slots),  # a chunk of a prompt is computed as well
            has_other_work=self._has_other_work,
        )
        filling = time.perf_counter() - began
        which = np.full(len(rows), -1, dtype=np.int32)
        which[masked] = shared.places
        if late:
            behind = np.array(masked)[late]
            self.late += len(late)
            self._scheduler.recompute_last(batch.slots[rows[behind]])
            rows, which = np.delete(rows, behind), np.delete(which, behind)
        return MaskedRows(rows, Masks(shared.written, which), filling)

    def close(self) -> None:
        """Ends the threads, and releases the memory of the masks: on a GPU, it is pinned."""
        self._words = self._words[:0].copy()
        self._filler.close()


def adjustments(
    batch: Batch, rows: NDArray[np.int64], table: SlotTable, eos_ids: frozenset[int]
) -> dict[int, DrawAdjustments]:
    """Adjustments for rows whose draws need more than the sampling table and masks, by index into `rows`."""
    found: dict[int, DrawAdjustments] = {}
    which = (table.watched[batch.slots[rows]] == DRAWS).nonzero()[0]
    for i, row in zip(which.tolist(), rows[which].tolist()):
        request = batch.requests[row]
        tokens = table.tokens[request.slot, : table.length[request.slot]]
        params = request.params
        early = len(tokens) - request.prompt_len < params.min_tokens
        banned = tuple(request.output.ends | eos_ids) if early else ()  # even with ignore_eos, as in SGLang
        found[i] = DrawAdjustments(params, tokens, request.prompt_len, banned, request.processor)
    return found
