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
        self._last = {row: 0 for row in batch.drafts if live[row] and (row, 0) in self._draws}
        for row in self._last:
            self._drafts.check(batch.requests[row], batch.drafts[row])
        self._limits = {row: int(self._table.limit[batch.slots[row]]) for row in self._last}

    def next_draws(self) -> NDArray[np.int64]:
        """Draws to read next: the one behind the last token of each row, if it counts. Settles the other drafts."""
        found: list[int] = []
        for row, last in list(self._last.items()):
            request, start = self._batch.requests[row], int(self._batch.ends[row])
            draw = None
            if request.handle is not None and self._table.limit[request.slot] == self._limits[row]:
                draw = self._following(row, request.slot, start, last)
            if draw is None:
                del self._last[row]
                self._drafts.settle(request, self._batch.drafts[row], start)
            else:
                self._drafts.accept(request)
                found.append(draw)
        return np.array(found, dtype=np.int64)

    def _following(self, row: int, slot: int, start: int, last: int) -> int | None:
        """The draw behind the last token of a row, or None if it does not count."""
        known = int(self._table.known[slot])
        count, draft = known - start, self._batch.drafts[row].tokens
        if count <= last or count > len(draft) or (self._table.tokens[slot, start:known] != draft[:count]).any():
            return None
        self._last[row] = count
        return self._draws.get((row, count))
