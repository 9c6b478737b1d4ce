"""Makes drafts for rows. Appends the best guess of all drafters, token by token, as long as the
guess is likely enough to save time.
"""

from __future__ import annotations

import logging
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from heapq import heapify, heappop, heapreplace
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from sglang_lite.runtime.drafting.draft import Draft, DraftedGuess, DraftWriter
from sglang_lite.runtime.drafting.guess import Drafter, Guess, Guesser
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.output_builder import DraftProgress
from sglang_lite.runtime.requests.request import Request

logger = logging.getLogger("sglang_lite")

TAIL = 16  # number of a text's last tokens that drafters see
_KEPT = 0.98  # decay of earlier guesses per new one of the same evidence
_KEPT_OF_ROW = 0.95  # the same per row, for any evidence
# the same per guess that is skipped as unlikely: after some hundreds, one is tried again
_KEPT_UNTRIED = 0.998


@dataclass(slots=True)
class DraftCounts:
    """Number of drafted guesses, and how many of them were right."""

    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class _Record:
    """Decayed hits and trials for one kind of evidence."""

    right: float = 0.0
    tried: float = 0.0


class _AskedRow(NamedTuple):
    """Row whose guesses have been requested.

    Attributes:
        writer: writer of its draft.
        candidates: guesses that come next.
        guesses: guesses that are already written.
    """

    writer: DraftWriter
    candidates: Iterator[DraftedGuess]
    guesses: list[DraftedGuess]

    def draft_first_guesses(self, count: int) -> Draft:
        """Builds the draft of the first `count` guesses."""
        return self.writer.build_draft(tuple(self.guesses)).cut_to_guesses(count)


class OpenRow(NamedTuple):
    """Row of a step that may have a draft.

    Attributes:
        request: its request.
        known: all its tokens, prompt included, int32.
        room: maximum number of drafted tokens.
    """

    request: Request
    known: Ints
    room: int


class Drafting:
    """Makes drafts. Used only on the loop's thread.

    Args:
        drafters: sources of guesses; among equally likely guesses the first drafter's counts.
        most: maximum number of guesses in a draft.
        vocab_size: number of token ids.
        eos_ids: tokens that may end a generation.
        jump: whether text that a grammar forces is appended as a whole.

    Attributes:
        most: the argument of this name.
        counts: counts by drafter.
        cost: time of steps.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        most: int,
        vocab_size: int,
        eos_ids: frozenset[int],
        *,
        jump: bool,
    ) -> None:
        self._drafters = list(drafters)
        self.most = most
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._jump = jump
        self._of_grammars = all(drafter.name == "grammar" for drafter in drafters)
        self.counts = {drafter.name: DraftCounts() for drafter in drafters}
        self.cost = StepCost()
        self._records = defaultdict[tuple[str, int], _Record](_Record)
        # tokens, and the index of the first new one
        self._unlearned: list[tuple[Request, list[int], int]] = []
        self._chances = {
            drafter.name: partial(self.hit_rate_of_evidence, drafter.name) for drafter in drafters
        }

    def may_draft(self, request: Request) -> bool:
        """Returns False if no drafter can have guesses for the request, whatever its text."""
        # fast path: runs for each row in each step
        if self._of_grammars and request.output.matcher is None:
            return False
        return any(drafter.can_draft(request) for drafter in self._drafters)

    def write_drafts(
        self, rows: Sequence[OpenRow], drawn: int, tokens: int, budget: int
    ) -> dict[int, Draft]:
        """Writes drafts for the rows of a step, and returns them by request id. Chooses the number
        of guesses that is expected to yield the most tokens per second.

        The drafts grow by one guess at a time, as long as another guess may save time. Each new
        guess is, among the next guesses of all rows, the one that is most likely to be right
        together with all guesses before it in its row.

        Args:
            rows: rows that may have a draft.
            drawn: number of rows whose next token the step draws.
            tokens: number of tokens of the step without drafts.
            budget: maximum number of drafted tokens.
        """
        likeliest = self.highest_hit_rate()
        bounds = [
            min(likeliest * _hit_ratio_to_expected(row.request.output.draft), 1.0) for row in rows
        ]
        heap: list[tuple[float, int, DraftedGuess | None]] = [
            (-bound, i, None) for i, bound in enumerate(bounds)
        ]
        heapify(heap)
        asked: dict[int, _AskedRow] = {}
        order: list[int] = []  # row of each guess
        expected = float(drawn)
        best = drawn / self.cost.estimate_seconds(tokens)
        taken = 0
        most = tokens
        while heap and budget >= 0:
            _, i, guess = heap[0]
            if guess is None:  # computed only once no other can be likelier
                row = asked.get(i) or asked.setdefault(i, self._request_guesses(rows[i]))
                guess = next(row.candidates, None)
                if guess is None:
                    heappop(heap)
                else:
                    heapreplace(heap, (-guess.likely, i, guess))
                continue
            if tokens >= most:
                most = self.cost.next_worthwhile_size(tokens, expected, guess.likely, best)
                if not most:
                    break
            row = asked[i]
            size = len(row.writer.append_with_forced(guess.token))
            heapreplace(heap, (-guess.likely * bounds[i], i, None))
            if not size:
                continue  # its grammar forbids it
            row.guesses.append(guess)
            order.append(i)
            tokens = tokens + size
            budget = budget - size
            expected = expected + guess.likely
            if budget >= 0 and (rate := expected / self.cost.estimate_seconds(tokens)) >= best:
                best = rate
                taken = len(order)
        counts = Counter(order[:taken])
        unwritten = {i: guess for _, i, guess in heap}
        for i, row in asked.items():
            left_out = row.guesses[counts[i]] if counts[i] < len(row.guesses) else unwritten.get(i)
            if left_out is not None:
                self._decay_evidence(left_out)
        return {
            rows[i].request.id: asked[i].draft_first_guesses(count) for i, count in counts.items()
        }

    def _request_guesses(self, row: OpenRow) -> _AskedRow:
        params = row.request.params
        matcher = row.request.output.matcher
        # a thread that makes a mask may be using the matcher; drafters would use it, too
        in_use = matcher is not None and matcher.busy
        drafts = params.speculation and row.request.processor is None and not in_use
        jump = self._jump and not params.scores_tokens
        writer = DraftWriter(matcher, row.room if drafts else 0, jump=jump)
        return _AskedRow(writer, self._candidate_guesses(row, writer), [])

    def _candidate_guesses(self, row: OpenRow, writer: DraftWriter) -> Iterator[DraftedGuess]:
        """Yields guesses for a row, the likeliest first. They are for the same position until the
        caller has written one. Then they are for the following position.
        """
        self.observe_tokens(row.request, row.known)
        if not writer.is_open:
            return
        output = row.request.output
        text = row.known[-TAIL:].tolist()
        guessers = self._make_guessers(row.request, row.known)
        luck = _hit_ratio_to_expected(output.draft)
        likely = 1.0
        for _ in range(self.most):
            place = len(writer.tokens)
            for chance, name, (token, evidence) in self._ranked_guesses(
                guessers, text, writer.state
            ):
                if (
                    not 0 <= token < self._vocab_size
                    or token in self._eos_ids
                    or token in output.ends
                ):
                    continue  # nothing may follow it
                guess = DraftedGuess(
                    place, token, name, evidence, chance, likely * min(chance * luck, 1.0)
                )
                yield guess
                if len(writer.tokens) > place:
                    likely = guess.likely
                    break
            if len(writer.tokens) == place or not writer.is_open:
                return
            text += writer.tokens[place:]

    def _decay_evidence(self, guess: DraftedGuess) -> None:
        """Decays the record of a guess that was too unlikely to be written, so that guesses with
        the same evidence are eventually tried again.
        """
        record = self._records[guess.drafter, guess.evidence]
        record.right = record.right * _KEPT_UNTRIED
        record.tried = record.tried * _KEPT_UNTRIED

    def hit_rate_of_evidence(self, drafter: str, evidence: int) -> float:
        """Returns the share of right guesses among a drafter's earlier guesses with this evidence."""
        return _smoothed_hit_rate(self._records[drafter, evidence])

    def highest_hit_rate(self) -> float:
        """Returns the largest share of right guesses among all kinds of evidence."""
        return max((_UNKNOWN, *map(_smoothed_hit_rate, self._records.values())))

    def record_outcome(
        self, draft: Draft, matched: int, came: int, progress: DraftProgress
    ) -> None:
        """Records the outcome of a draft, and updates the progress of its request.

        Args:
            draft: the draft.
            matched: number of its first tokens that were right.
            came: number of tokens that the row actually has from the draft's start on.
            progress: progress of its request.
        """
        for guess in draft.guesses:
            right = guess.place < matched
            counts = self.counts[guess.drafter]
            counts.drafted = counts.drafted + 1
            counts.accepted = counts.accepted + right
            if guess.place <= matched and guess.place < came:
                record = self._records[guess.drafter, guess.evidence]
                record.right = record.right * _KEPT + right
                record.tried = record.tried * _KEPT + 1
                progress.hoped = progress.hoped * _KEPT_OF_ROW + guess.chance
                progress.right = progress.right * _KEPT_OF_ROW + right

    def stats(self) -> dict[str, dict[str, int]]:
        """Returns counts by drafter, as plain data."""
        return {name: asdict(counts) for name, counts in self.counts.items()}

    # ------------------------------------------------------------------------------------- drafters

    def observe_tokens(self, request: Request, known: Ints) -> None:
        """Queues the tokens of a request that drafters have not seen yet. `learn_queued_tokens`
        then passes them to the drafters.

        Args:
            request: the request.
            known: all its tokens, prompt included.
        """
        start = max(request.output.draft.learned, request.prompt_len)
        request.output.draft.learned = len(known)
        if start < len(known):
            first = max(start - TAIL, 0)
            self._unlearned.append((request, known[first:].tolist(), start - first))

    def learn_queued_tokens(self) -> None:
        """Lets drafters learn the queued tokens."""
        for request, text, start in self._unlearned:
            for drafter in self._drafters:
                try:
                    drafter.learn_tokens(request, text, start)
                except Exception:  # requests continue without it
                    self._disable_drafter(drafter)
        self._unlearned = []

    def _make_guessers(self, request: Request, known: Ints) -> list[tuple[Drafter, Guesser]]:
        found: list[tuple[Drafter, Guesser]] = []
        for drafter in self._drafters:
            try:
                if drafter.can_draft(request):
                    found.append(
                        (drafter, drafter.make_guesser(request, known, self._chances[drafter.name]))
                    )
            except Exception:
                self._disable_drafter(drafter)
        return found

    def _ranked_guesses(
        self, guessers: Sequence[tuple[Drafter, Guesser]], text: Sequence[int], state: Hashable
    ) -> list[tuple[float, str, Guess]]:
        """Returns guesses of the next token with their chances and the names of their drafters, the
        likeliest first.
        """
        found: list[tuple[float, str, Guess]] = []
        for drafter, guesser in guessers:
            try:
                guess = guesser(text, state)
            except Exception:
                self._disable_drafter(drafter)
                continue
            if guess is not None:
                found.append(
                    (self.hit_rate_of_evidence(drafter.name, guess.evidence), drafter.name, guess)
                )
        if len(found) > 1:
            found.sort(key=itemgetter(0), reverse=True)
        return found

    def _disable_drafter(self, drafter: Drafter) -> None:
        """Logs the exception that a drafter has raised, and stops using the drafter."""
        logger.exception("the drafter %r failed, and is off from now on", drafter.name)
        self._drafters = [other for other in self._drafters if other is not drafter]


def _smoothed_hit_rate(record: _Record) -> float:
    """Returns the smoothed share of right guesses, an estimate of the chance that the next one is
    right.
    """
    return (record.right + 1) / (record.tried + 2)


_UNKNOWN = _smoothed_hit_rate(_Record())


def _hit_ratio_to_expected(progress: DraftProgress) -> float:
    """Returns the smoothed ratio of a row's recent right guesses to the expected number."""
    return (progress.right + 8) / (progress.hoped + 8)


_SLOPE = 0.05  # assumed time of a token, as a share of a step's time, until steps are measured
_KEPT = 0.98  # decay of earlier steps per new one
_MAX_TOKENS = 256  # larger steps say nothing about the cost of a few more tokens


class StepCost:
    """Estimate of a step's duration, fitted to recent steps: a fixed time, plus a time per token.
    If durations were measured in advance, only the time that exceeds them is fitted.
    """

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, tokens, seconds, tokens², tokens * seconds
        self._step = 1.0
        self._token = _SLOPE
        self._measured: list[float] = []  # by number of tokens
        self._sizes: list[int] = []  # numbers of tokens that were measured, ascending
        self._most = _MAX_TOKENS

    def use_measured_times(self, seconds: Mapping[int, float]) -> None:
        """Sets durations of steps that were measured in advance, by number of tokens. A step of
        another size is assumed to take as long as the next larger one.
        """
        self._sizes = counts = sorted(seconds)
        times = np.maximum.accumulate([seconds[count] for count in counts])
        self._measured = times[np.searchsorted(counts, np.arange(counts[-1] + 1))].tolist()
        self._most = counts[-1]
        self._step = self._token = 0.0

    def record_step_cost(self, tokens: int, seconds: float) -> None:
        """Records the duration of a step."""
        if tokens > self._most:
            return
        if self._measured:
            seconds -= self._measured[tokens]
        self._sums = self._sums * _KEPT + (1, tokens, seconds, tokens * tokens, tokens * seconds)
        count, x, y, xx, xy = self._sums.tolist()
        spread = count * xx - x * x
        if spread > 0.01 * count * xx:  # steps of several sizes
            self._token = max((count * xy - x * y) / spread, 0.0)
            self._step = max((y - self._token * x) / count, 0.0)
        elif self._measured:
            self._step = max((y - self._token * x) / count, 0.0)
        else:
            self._step = 1.0
            self._token = _SLOPE

    def estimate_seconds(self, tokens: int) -> float:
        """Estimates how many seconds a step with this number of tokens takes."""
        measured = self._measured[min(tokens, self._most)] if self._measured else 0.0
        return max(measured + self._step + self._token * tokens, 1e-9)

    def next_worthwhile_size(self, tokens: int, expected: float, likely: float, best: float) -> int:
        """Returns the next larger number of tokens to consider for a step. Steps up to that size
        hardly differ in duration.

        Returns 0 if no larger step can yield as many tokens per second as a known one.

        Args:
            tokens: number of tokens of the step.
            expected: number of tokens that it is expected to yield.
            likely: maximum chance that the step yields a further token if it is added.
            best: known rate in tokens per second.
        """
        sizes = self._sizes[bisect(self._sizes, tokens) :] or [tokens + 1]
        pays = any(
            (expected + likely * (size - tokens)) / self.estimate_seconds(size) >= best
            for size in sizes
        )
        return sizes[0] if pays else 0
