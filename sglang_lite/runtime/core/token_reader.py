"""Reads drawn tokens: selects tokens that the host must inspect, ends requests, and accepts drafts
that the draws confirm.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sglang_lite.protocol import SglError, TokenLogprob
from sglang_lite.runtime.core.step_clock import StepClock
from sglang_lite.runtime.core.step_masks import MaskedRows
from sglang_lite.runtime.core.token_watch import GRAMMAR, STOPS, TEXT, TokenWatch
from sglang_lite.runtime.executor.sampler import SampledTokens
from sglang_lite.runtime.requests.output_builder import Finish
from sglang_lite.runtime.requests.request import Request, State, WatchedTokens
from sglang_lite.runtime.scheduler.batch import Batch
from sglang_lite.runtime.scheduler.scheduler import Scheduler

_SPARE_STEPS = 8  # an output may be cut this many steps before its deadline
_NO_DRAWS: NDArray[np.int64] = np.empty(0, dtype=np.int64)


class TokenReader:
    """Appends the tokens that steps draw to their requests.

    Args:
        scheduler: scheduler of the requests.
        watch: which new tokens the host must look at.
        clock: clock of the requests' deadlines.
        jump: whether to append forced tokens of grammars as a whole.
    """

    def __init__(
        self, scheduler: Scheduler, watch: TokenWatch, clock: StepClock, *, jump: bool
    ) -> None:
        self._scheduler = scheduler
        self._watch = watch
        self._clock = clock
        self._jump = jump

    def begin_output(self, request: Request) -> None:
        """Appends the tokens that a request's grammar forces before its first draw, and sets
        `ending` if nothing is left to draw.
        """
        if request.times.winds_down:
            self.wind_down(request)
        output = request.output
        if request.replayed_count or output.begins_with_text:
            output.send_known_text()
        # `Request.replay_given_output` has applied the grammar
        known = request.replayed_count or request.ending is not None
        if self._jump and output.matcher is not None and not known:
            tokens, request.ending = request.append_forced_tokens(
                request.limit - request.prompt_len, masked=request.watched is WatchedTokens.GRAMMAR
            )
            if tokens:
                request.tokens = np.concatenate((request.tokens, np.array(tokens, dtype=np.int32)))
        if request.ending is not None:
            request.limit = len(request.tokens)  # no more tokens are drawn
        elif request.limit == len(request.tokens):
            request.ending = Finish("length", None)

    def wind_down(self, request: Request) -> None:
        """Makes a request end early: text at its next token, and JSON as soon as closing brackets
        can complete it.

        Output that can't be completed runs to its normal end.

        Args:
            request: request that has not ended, and whose constraint is compiled.
        """
        request.times.winds_down = True
        if request.output.cut is not None or request.params.scores_next_token:
            return
        if request.handle is None:
            request.limit = min(request.limit, len(request.tokens) + 1)
            return
        table = self._scheduler.store.table
        slot = request.slot
        soonest = max(int(table.known[slot]) + 1, int(table.length[slot]))
        request.limit = min(request.limit, soonest)
        table.limit[slot] = min(int(table.limit[slot]), soonest)

    def read_draws(
        self, batch: Batch, drawn: MaskedRows, live: NDArray[np.bool_], sampled: SampledTokens
    ) -> Iterator[tuple[Request, Finish | SglError]]:
        """Appends drawn tokens, and processes those the host must inspect. Yields each request that
        ends, with its finish reason or its error.

        Args:
            batch: batch of the step.
            drawn: draws of the step.
            live: True for the rows of the batch whose draws are to be used.
            sampled: tokens of all draws.
        """
        verification = (
            Verification(self._scheduler, batch, drawn, sampled, live) if batch.drafts else None
        )
        which = (live[drawn.rows] & (drawn.offsets == 0)).nonzero()[0]
        if verification is not None:
            which = verification.record_confirmed_drafts(which, drawn.rows)
        while len(which):
            yield from self._read_one_draw(batch, drawn.rows, which, sampled)
            which = _NO_DRAWS if verification is None else verification.next_draws()

    def _read_one_draw(
        self,
        batch: Batch,
        rows: NDArray[np.int64],
        which: NDArray[np.int64],
        sampled: SampledTokens,
    ) -> Iterator[tuple[Request, Finish | SglError]]:
        """Reads one draw of each row, like `read_draws`.

        Args:
            batch: batch of the step.
            rows: row of each draw, int64.
            which: indices into `rows` of the draws to use, int64.
            sampled: tokens of all draws, in the order of `rows`.
        """
        table = self._scheduler.store.table
        slots = batch.slots[rows[which]]
        tokens = np.array(sampled.tokens, dtype=np.int32)[which]
        self._scheduler.record_tokens(slots, tokens)
        full = table.known[slots] >= table.limit[slots]
        selected = self._watch.select_rows_to_inspect(slots, tokens, full)
        for row, i, kind, token, at_end in zip(
            rows[which[selected]].tolist(),
            which[selected].tolist(),
            table.watched[slots[selected]].tolist(),
            tokens[selected].tolist(),
            full[selected].tolist(),
        ):
            request = batch.requests[row]
            try:
                if kind >= GRAMMAR and request.must_redraw(token):
                    self._scheduler.discard_last_draw(request)
                    continue
                if sampled.scores is not None and table.scored[request.slot]:
                    request.output.record_score(*sampled.scores[:, i].tolist())
                finish = self._process_token(request, kind, token, sampled.logprobs.get(i))
                if finish is None and not at_end and request.times.deadline is not None:
                    at_end = self._must_cut_now(request, request.times.deadline)
                if finish is None and not at_end and request.times.winds_down:
                    at_end = self._can_close_output_now(request)
                if (
                    finish is None
                    and not at_end
                    and self._jump
                    and request.output.matcher is not None
                ):
                    finish, at_end = self._jump_forward(request, masked=kind == GRAMMAR)
            except SglError as error:
                yield request, error
                continue
            if finish is None and at_end:
                finish = Finish("length", None)
            if finish is not None:
                yield request, finish

    def _process_token(
        self, request: Request, kind: int, token: int, logprob: TokenLogprob | None
    ) -> Finish | None:
        if kind == GRAMMAR:
            return request.output.advance_grammar(token)
        if kind >= TEXT:
            return request.output.process_tokens((token,), logprob)
        table = self._scheduler.store.table
        if kind == STOPS or table.paced[request.slot]:
            known = table.tokens[request.slot, : table.known[request.slot]]
            return request.output.process_tokens(request.undecoded_tokens(known), None)
        return Finish("stop", token) if token in request.output.ends else None

    def _must_cut_now(self, request: Request, deadline: float) -> bool:
        """Returns whether a request's time is nearly up and its output could be closed into a
        complete value now.
        """
        if request.output.cut is None or self._clock.steps_until(deadline) > _SPARE_STEPS:
            return False
        return self._can_close_output_now(request)

    def _can_close_output_now(self, request: Request) -> bool:
        """Returns whether a request's output could be closed into a complete value if it were cut
        now.
        """
        table = self._scheduler.store.table
        slot = request.slot
        return request.output.would_close_if_truncated(
            table.tokens[slot, request.prompt_len : table.known[slot]].tolist()
        )

    def _jump_forward(self, request: Request, *, masked: bool) -> tuple[Finish | None, bool]:
        """Appends the tokens that the request's grammar forces, like
        `Request.append_forced_tokens`. Returns the reason for the end, if any, and whether the
        request has reached its maximum length.
        """
        table = self._scheduler.store.table
        slot = request.slot
        room = int(table.limit[slot] - table.known[slot])
        tokens, finish = request.append_forced_tokens(room, masked=masked)
        if tokens:
            self._scheduler.append_tokens(request, tokens)
        return finish, len(tokens) >= room


class Verification:
    """Verifies the drafts of a step while its draws are read, one draw of each row at a time.

    The next draw counts if all tokens recorded before it, drawn or forced, equal the drafted ones.

    Args:
        scheduler: scheduler of the step.
        batch: batch of the step.
        drawn: draws of the step.
        sampled: their tokens.
        live: True for the rows of the batch whose draws are to be used.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        batch: Batch,
        drawn: MaskedRows,
        sampled: SampledTokens,
        live: NDArray[np.bool_],
    ) -> None:
        assert scheduler.drafts is not None
        self._table = scheduler.store.table
        self._drafts = scheduler.drafts
        self._batch = batch
        places = zip(drawn.rows.tolist(), drawn.offsets.tolist())
        self._draws = {
            place: i for i, place in enumerate(places) if not place[1] or i not in sampled.errors
        }
        self._tokens = sampled.tokens
        # By row: number of its drafted tokens that were confirmed so far, and its drafted tokens.
        self._last = {row: 0 for row in batch.drafts if live[row] and (row, 0) in self._draws}
        self._drafted = {row: batch.drafts[row].tokens.tolist() for row in self._last}
        for row in self._last:
            self._drafts.record_draft_check(batch.requests[row], batch.drafts[row])
        self._limits: dict[int, int] = dict(
            zip(self._last, self._table.limit[batch.slots[[*self._last]]].tolist())
        )

    def record_confirmed_drafts(
        self, which: NDArray[np.int64], rows: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Records the tokens of a confirmed draft together rather than one by one. Only for rows
        whose tokens need no individual inspection and don't end the request.

        Returns the draws to read first: the ones after the confirmed drafts.

        Args:
            which: the first draw of each row.
            rows: row of each draw.
        """
        slots = self._batch.slots
        table = self._table
        found = which.copy()
        kinds = table.watched[slots]
        looked_at = (
            ((kinds > 0) & (kinds != GRAMMAR)) | (table.paced[slots] > 0) | table.scored[slots]
        )
        for at, row in enumerate(rows[which].tolist()):
            request = self._batch.requests[row]
            if looked_at[row] or row not in self._last or request.state is not State.DECODING:
                continue
            draft = self._batch.drafts[row]
            drafted = self._drafted[row]
            draw = which[at]
            came = 0
            count = 0
            for place in draft.drawn:
                behind = self._draws.get((row, place))
                if behind is None or self._tokens[draw] != drafted[came]:
                    break
                draw = behind
                came = place
                count = count + 1
            if count and self._drafts.accept_skipped_draws(request, draft, count):
                found[at] = draw
                self._last[row] = came
        return found

    def next_draws(self) -> NDArray[np.int64]:
        """Returns the next draw to read of each row whose tokens so far match its draft: the draw
        after the row's last token. Settles the drafts of the other rows.
        """
        found: list[int] = []
        rows = [*self._last]
        table = self._table
        batch = self._batch
        slots = batch.slots[rows]
        known = table.known[slots]
        newest = table.tokens[slots, known - 1]
        counts = (known - batch.ends[rows]).tolist()
        for row, limit, count, token in zip(
            rows, table.limit[slots].tolist(), counts, newest.tolist()
        ):
            request = batch.requests[row]
            draw = None
            if (
                request.handle is not None
                and limit == self._limits[row]
                and self._matches_draft(row, count, token)
            ):
                self._last[row] = count
                draw = self._draws.get((row, count))
            if draw is None:
                del self._last[row]
                self._drafts.settle_draft(request, batch.drafts[row], int(batch.ends[row]))
            else:
                self._drafts.accept_draws(request)
                found.append(draw)
        return np.array(found, dtype=np.int64)

    def _matches_draft(self, row: int, count: int, newest: int) -> bool:
        """Returns whether the tokens that a row has gained since its last draw match its draft.
        `count` is the number of its tokens since the start of the draft.
        """
        last = self._last[row]
        drafted = self._drafted[row]
        if count == last + 1:
            return count <= len(drafted) and drafted[last] == newest
        start = int(self._batch.ends[row])
        came = self._table.tokens[self._batch.slots[row], start + last : start + count].tolist()
        return count > last and drafted[last:count] == came
