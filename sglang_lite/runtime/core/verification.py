"""Verification of drafts, by equality: which draws behind drafted tokens count."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.core.step_masks import MaskedRows
from sglang_lite.runtime.executor.sampler import Sampled
from sglang_lite.runtime.scheduler.batch import Batch
from sglang_lite.runtime.scheduler.scheduler import Scheduler


class Verification:
    """Drafts of a step while its draws are read, one draw of each row at a time. The next draw counts if all tokens
    that were recorded before it, drawn or forced, equal those that were drafted.

    Args:
        scheduler: scheduler of the step.
        batch: batch of the step.
        drawn: draws of the step.
        sampled: their tokens.
        live: True for the rows of the batch whose draws are to be used.
    """

    def __init__(
        self, scheduler: Scheduler, batch: Batch, drawn: MaskedRows, sampled: Sampled, live: NDArray[np.bool_]
    ) -> None:
        assert scheduler.drafts is not None
        self._table, self._drafts, self._batch = scheduler.store.table, scheduler.drafts, batch
        places = zip(drawn.rows.tolist(), drawn.offsets.tolist())
        self._draws = {place: i for i, place in enumerate(places) if not place[1] or i not in sampled.errors}
        # Of each row: number of its drafted tokens that came, and all of them.
        self._last = {row: 0 for row in batch.drafts if live[row] and (row, 0) in self._draws}
        self._drafted = {row: batch.drafts[row].tokens.tolist() for row in self._last}
        for row in self._last:
            self._drafts.check(batch.requests[row], batch.drafts[row])
        self._limits: dict[int, int] = dict(zip(self._last, self._table.limit[batch.slots[[*self._last]]].tolist()))

    def next_draws(self) -> NDArray[np.int64]:
        """Draws to read next: the one behind the last token of each row, if it counts. Settles the other drafts."""
        found: list[int] = []
        rows, table, batch = [*self._last], self._table, self._batch
        slots = batch.slots[rows]
        known = table.known[slots]
        newest = table.tokens[slots, known - 1]
        counts = (known - batch.ends[rows]).tolist()
        for row, limit, count, token in zip(rows, table.limit[slots].tolist(), counts, newest.tolist()):
            request, draw = batch.requests[row], None
            if request.handle is not None and limit == self._limits[row] and self._came(row, count, token):
                self._last[row] = count
                draw = self._draws.get((row, count))
            if draw is None:
                del self._last[row]
                self._drafts.settle(request, batch.drafts[row], int(batch.ends[row]))
            else:
                self._drafts.accept(request)
                found.append(draw)
        return np.array(found, dtype=np.int64)

    def _came(self, row: int, count: int, newest: int) -> bool:
        """True if the tokens of a row since its last draw, of which there are `count` in all, are those drafted."""
        last, drafted = self._last[row], self._drafted[row]
        if count == last + 1:
            return count <= len(drafted) and drafted[last] == newest
        start = int(self._batch.ends[row])
        came = self._table.tokens[self._batch.slots[row], start + last : start + count].tolist()
        return count > last and drafted[last:count] == came
