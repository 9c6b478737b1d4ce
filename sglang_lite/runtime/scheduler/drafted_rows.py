"""Drafts of running requests: allocates their pages, and records whether the drafts turn out
right.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from sglang_lite.runtime.drafting.draft import Draft
from sglang_lite.runtime.drafting.drafting import Drafting, OpenRow
from sglang_lite.runtime.drafting.turns import Turns
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.requests.request import Request, State
from sglang_lite.runtime.scheduler.batch import Batch
from sglang_lite.runtime.scheduler.queues import Queues
from sglang_lite.runtime.scheduler.retraction import request_slots

_MISSES = 3  # after this many steps without a right guess, a row gets fewer drafts


def max_draft_tokens(slots: int) -> int:
    """Returns the maximum number of drafted tokens per step for an engine with this many slots."""
    return max(3 * slots, 128)


class DraftedRows:
    """Drafts of running requests.

    Drafted tokens come after the known ones in the slot table. They count as computed once they are
    known to be right, so a guess never enters the radix tree.

    Args:
        store: pages, slots and radix tree.
        queues: requests that have not ended.
        drafting: maker of drafts.
        turns: creates a `Turns`, which alternates between steps with and without drafts. There is
            one for each size of batch, because drafts for many rows take the host longer and gain
            less. None for drafts at every step.

    Attributes:
        drafting: the argument of this name.
    """

    def __init__(
        self,
        store: PrefixCache,
        queues: Queues,
        drafting: Drafting,
        turns: Callable[[], Turns] | None = None,
    ) -> None:
        self._store = store
        self._queues = queues
        self.drafting = drafting
        # turns by bit length of the number of rows
        self._turns = None if turns is None else defaultdict[int, Turns](turns)
        self._read = 0.0  # time when the tokens of a step were last read
        self._saved_before = 0
        self._steps = self._saved = 0  # numbers of checked drafts, and of draws that they saved
        self._skipped = 0  # number of saved draws accepted without individual inspection
        self._checked: list[Callable[[], None]] = []  # functions that record outcomes of drafts

    @property
    def should_draft(self) -> bool:
        """Whether the next step should have drafts. If so, the previous step's tokens have to be
        read first.
        """
        rows = *self._queues.decoding, *self._queues.prefilling
        if self._turns is not None and not self._turns[len(rows).bit_length()].drafts:
            return False
        return any(map(self.drafting.may_draft, rows))

    def record_step(self, batch: Batch, offsets: Ints, planned: float) -> None:
        """Records that the tokens of a step have been read, to measure whether drafts pay.

        Args:
            batch: its rows.
            offsets: number of drafted tokens before each draw.
            planned: time when it was planned, on the clock `time.perf_counter()`.
        """
        if self._turns is None:
            return
        now = time.perf_counter()
        rows = len(batch.slots)
        drawn = int((offsets == 0).sum())
        seconds = now - max(self._read, planned)
        self._read = now
        tokens = drawn + self._saved - self._saved_before
        self._saved_before = self._saved
        if batch.started or not batch.draws.all():
            return  # prompts would distort the time
        turns = self._turns[rows.bit_length()]
        if turns.drafts:
            self.drafting.cost.record_step_cost(batch.tokens, seconds)
        turns.record_timing(tokens * self.drafting.cost.estimate_seconds(rows) / rows, seconds)

    def stats(self) -> dict[str, object]:
        """Returns counts by drafter, SGLang's average accept length (tokens per row in steps that
        check drafts), and the number of draws that were accepted without individual inspection.
        """
        self.record_outcomes()
        length = 1 + self._saved / max(self._steps, 1)
        return {
            "drafters": self.drafting.stats(),
            "avg_spec_accept_length": length,
            "draws_taken_at_once": self._skipped,
        }

    def plan_drafts(
        self, decoding: Sequence[Request], chunks: Sequence[tuple[Request, int, int]], budget: int
    ) -> dict[int, Draft]:
        """Returns the drafts of a step's rows by request id, at most `budget` tokens in all.

        They only get free pages: nothing is evicted or retracted for a guess.

        Args:
            decoding: requests that compute their last token.
            chunks: rows of prefill; those that reach their last token get drafts.
            budget: maximum number of tokens.
        """
        table = self._store.table
        budget = min(budget, max_draft_tokens(len(table.length)))
        rows = (
            *decoding,
            *(request for request, _, end in chunks if end == table.length[request.slot]),
        )
        slots = request_slots(rows)
        lengths = table.length[slots]
        rooms = np.minimum(table.limit[slots] - lengths - 1, budget) * (
            table.known[slots] == lengths
        )
        asked: list[OpenRow] = []
        for request, length, room in zip(rows, lengths.tolist(), rooms.tolist()):
            if room <= 0 or not self.drafting.may_draft(request):
                continue
            progress = request.output.draft
            if progress.rest:
                progress.rest -= 1
                continue
            # unlikely drafts take time: with many rows, more than they save
            if progress.misses >= _MISSES:
                progress.rest = min(1 << min(progress.misses - _MISSES, 6), len(rows) // 2)
            progress.misses += 1
            asked.append(OpenRow(request, table.tokens[request.slot, :length], room))
        tokens = len(decoding) + sum(end - start for _, start, end in chunks)
        drafts = self.drafting.write_drafts(asked, len(rows), tokens, budget) if asked else {}
        of_rows = ((row, drafts[row.request.id]) for row in asked if row.request.id in drafts)
        written = ((row.request.id, self._write_draft(row, draft)) for row, draft in of_rows)
        return {of: draft for of, draft in written if len(draft.tokens)}

    def _write_draft(self, row: OpenRow, draft: Draft) -> Draft:
        """Writes a draft after the tokens of a row, cut to the pages that are free. Returns the
        draft as written.
        """
        slot = row.request.slot
        length = len(row.known)
        draft = draft.cut_to_tokens(
            self._store.reserve_free_pages(slot, length + len(draft.tokens)) - length
        )
        self._store.table.tokens[slot, length : length + len(draft.tokens)] = draft.tokens
        return draft

    def learn_from_request(self, request: Request) -> None:
        """Lets drafters learn from a request that has reached its end and still has its slot."""
        table = self._store.table
        slot = request.slot
        self.drafting.observe_tokens(request, table.tokens[slot, : table.known[slot]])
        self.drafting.learn_queued_tokens()

    def record_draft_check(self, request: Request, draft: Draft) -> None:
        """Counts a step that has checked a draft. Called before the step's draws are read."""
        progress = request.output.draft
        progress.steps = progress.steps + 1
        progress.drafted = progress.drafted + len(draft.guesses)
        self._steps += 1

    def accept_skipped_draws(self, request: Request, draft: Draft, count: int) -> bool:
        """Accepts the first `count` draws of a draft together, as `accept_draws` does for each of
        them.

        Returns False if they have to be inspected one by one.

        Args:
            request: the request.
            draft: its draft.
            count: number of draws for which the draft was right, counted from its start.
        """
        places = draft.drawn[:count]
        table = self._store.table
        slot = request.slot
        if draft.matchers:
            tokens = draft.tokens[: places[-1]].tolist()
            start = int(table.known[slot]) - request.prompt_len
            if not request.accept_checked_draft(start, tokens, places, draft.matchers[count - 1]):
                return False
        table.known[slot] += places[-1]
        self._skipped += count
        self.accept_draws(request, count)
        return True

    def accept_draws(self, request: Request, draws: int = 1) -> None:
        """Records that all known tokens of a request are already computed, because the draft
        guessed them. One more token is drawn after them.

        Args:
            request: the request.
            draws: number of draws that, thanks to the draft, needed no step of their own.
        """
        table = self._store.table
        slot = request.slot
        request.output.draft.accepted += draws
        self._saved += draws
        table.computed[slot] = table.known[slot]
        table.length[slot] = table.known[slot] + 1
        if request.state is State.PREFILLING:  # forced text was appended, and it was also drafted
            self._queues.move_to_decoding(request)

    def record_outcomes(self) -> None:
        """Passes the outcomes of the last drafts to the drafters, to guide later guesses. Also lets
        drafters learn from observed requests. On a GPU, this overlaps with the next step.
        """
        for record in self._checked:
            record()
        self._checked = []
        self.drafting.learn_queued_tokens()

    def settle_draft(self, request: Request, draft: Draft, start: int) -> None:
        """Records how many tokens of a draft were right, and frees the pages of the wrong ones.
        Called when none of the draft's later draws counts any more.

        Args:
            request: request of the draft; it may have ended.
            draft: the draft.
            start: position of its first token.
        """
        if request.handle is None:
            known = request.tokens
        else:
            table = self._store.table
            slot = request.slot
            known = table.tokens[slot, : table.known[slot]]
        progress = request.output.draft
        came = known[start:].tolist()
        matched = draft.count_matching_tokens(came)
        self._checked.append(
            partial(self.drafting.record_outcome, draft, matched, len(came), progress)
        )
        if matched:
            progress.misses = progress.rest = 0
        if request.handle is None:
            return
        table.computed[slot] = min(start + matched, int(table.length[slot]) - 1)
        self._store.free_pages_from(slot, int(table.length[slot]))
        if request.state is State.PREFILLING and table.length[slot] - table.computed[slot] == 1:
            self._queues.move_to_decoding(request)
