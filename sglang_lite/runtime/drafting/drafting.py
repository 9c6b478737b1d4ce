"""Drafts of rows: takes the best guess of all drafters, token by token, as long as it is likely enough to pay."""

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

TAIL = 16  # last tokens of a text that drafters see
_KEPT = 0.98  # weight of the guesses before, for each new one of the same evidence
_KEPT_OF_ROW = 0.95  # the same of a row, whatever the evidence
_KEPT_UNTRIED = 0.998  # the same if a guess was too unlikely: after some hundreds of them it is tried again


@dataclass(slots=True)
class DraftCounts:
    """Numbers of guesses that were computed, and of those that were right."""

    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class _Record:
    """Right guesses and all guesses of one evidence, earlier ones with less weight."""

    right: float = 0.0
    tried: float = 0.0


class _AskedRow(NamedTuple):
    """Row whose guesses are asked for.

    Attributes:
        writer: writer of its draft.
        candidates: guesses that come next.
        guesses: those that are written.
    """

    writer: DraftWriter
    candidates: Iterator[DraftedGuess]
    guesses: list[DraftedGuess]

    def draft(self, count: int) -> Draft:
        """The draft of the first `count` guesses."""
        return self.writer.draft(tuple(self.guesses)).first(count)


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
    """Maker of drafts. Used on the loop's thread alone.

    Args:
        drafters: sources of guesses; of equally likely ones the first counts.
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
        self, drafters: Sequence[Drafter], most: int, vocab_size: int, eos_ids: frozenset[int], *, jump: bool
    ) -> None:
        self._drafters, self.most, self._vocab_size, self._eos_ids = list(drafters), most, vocab_size, eos_ids
        self._jump = jump
        self._of_grammars = all(drafter.name == "grammar" for drafter in drafters)
        self.counts = {drafter.name: DraftCounts() for drafter in drafters}
        self.cost = StepCost()
        self._records = defaultdict[tuple[str, int], _Record](_Record)
        self._unlearned: list[tuple[Request, list[int], int]] = []  # tokens, and the index of the first new one
        self._chances = {drafter.name: partial(self.chance, drafter.name) for drafter in drafters}

    def drafts(self, request: Request) -> bool:
        """False if no drafter has guesses for any text of the request."""
        if self._of_grammars and request.output.matcher is None:  # asked of each row in each step
            return False
        return any(drafter.drafts(request) for drafter in self._drafters)

    def write(self, rows: Sequence[OpenRow], drawn: int, tokens: int, budget: int) -> dict[int, Draft]:
        """Drafts with which a step is expected to give the most tokens a second, by id of their request.

        They grow by one guess at a time, the likeliest of all rows to be right together with those before it, as long
        as more of them may pay.

        Args:
            rows: rows that may have a draft.
            drawn: number of rows whose next token the step draws.
            tokens: number of tokens of the step without drafts.
            budget: maximum number of drafted tokens.
        """
        likeliest = self.likeliest()
        bounds = [min(likeliest * _luck(row.request.output.draft), 1.0) for row in rows]
        heap: list[tuple[float, int, DraftedGuess | None]] = [(-bound, i, None) for i, bound in enumerate(bounds)]
        heapify(heap)
        asked: dict[int, _AskedRow] = {}
        order: list[int] = []  # row of each guess
        expected, best, taken, most = float(drawn), drawn / self.cost.seconds(tokens), 0, tokens
        while heap and budget >= 0:
            _, i, guess = heap[0]
            if guess is None:  # asked for once no other can be likelier
                row = asked.get(i) or asked.setdefault(i, self._asked(rows[i]))
                guess = next(row.candidates, None)
                if guess is None:
                    heappop(heap)
                else:
                    heapreplace(heap, (-guess.likely, i, guess))
                continue
            if tokens >= most:
                most = self.cost.worth_asking(tokens, expected, guess.likely, best)
                if not most:
                    break
            row = asked[i]
            size = len(row.writer.append(guess.token))
            heapreplace(heap, (-guess.likely * bounds[i], i, None))
            if not size:
                continue  # its grammar forbids it
            row.guesses.append(guess)
            order.append(i)
            tokens, budget, expected = tokens + size, budget - size, expected + guess.likely
            if budget >= 0 and (rate := expected / self.cost.seconds(tokens)) >= best:
                best, taken = rate, len(order)
        counts, unwritten = Counter(order[:taken]), {i: guess for _, i, guess in heap}
        for i, row in asked.items():
            left_out = row.guesses[counts[i]] if counts[i] < len(row.guesses) else unwritten.get(i)
            if left_out is not None:
                self._leave_out(left_out)
        return {rows[i].request.id: asked[i].draft(count) for i, count in counts.items()}

    def _asked(self, row: OpenRow) -> _AskedRow:
        params, matcher = row.request.params, row.request.output.matcher
        in_use = matcher is not None and matcher.busy  # by a thread that makes its mask; drafters would ask it, too
        drafts = params.speculation and row.request.processor is None and not in_use
        jump = self._jump and not params.scores_tokens
        writer = DraftWriter(matcher, row.room if drafts else 0, jump=jump)
        return _AskedRow(writer, self._candidates(row, writer), [])

    def _candidates(self, row: OpenRow, writer: DraftWriter) -> Iterator[DraftedGuess]:
        """Guesses of a row one by one, the likeliest ones. Once one is written, the next is for the place behind it;
        else for the same place."""
        self.observe(row.request, row.known)
        if not writer.is_open:
            return
        output, text = row.request.output, row.known[-TAIL:].tolist()
        guessers, luck, likely = self._guessers(row.request, row.known), _luck(output.draft), 1.0
        for _ in range(self.most):
            place = len(writer.tokens)
            for chance, name, (token, evidence) in self._guesses(guessers, text, writer.state):
                if not 0 <= token < self._vocab_size or token in self._eos_ids or token in output.ends:
                    continue  # nothing may follow it
                guess = DraftedGuess(place, token, name, evidence, chance, likely * min(chance * luck, 1.0))
                yield guess
                if len(writer.tokens) > place:
                    likely = guess.likely
                    break
            if len(writer.tokens) == place or not writer.is_open:
                return
            text += writer.tokens[place:]

    def _leave_out(self, guess: DraftedGuess) -> None:
        """Lets the evidence fade for which a guess was too unlikely, so that such guesses are tried again."""
        record = self._records[guess.drafter, guess.evidence]
        record.right, record.tried = record.right * _KEPT_UNTRIED, record.tried * _KEPT_UNTRIED

    def chance(self, drafter: str, evidence: int) -> float:
        """Share of a drafter's guesses of the same evidence that were right."""
        return _share(self._records[drafter, evidence])

    def likeliest(self) -> float:
        """Share of guesses that were right, of the evidence with most."""
        return max((_UNKNOWN, *map(_share, self._records.values())))

    def record(self, draft: Draft, matched: int, came: int, progress: DraftProgress) -> None:
        """Records what came in the place of a draft, also in the progress of its request.

        Args:
            draft: the draft.
            matched: number of its first tokens that came.
            came: number of tokens that are known to have come in its place.
            progress: progress of its request.
        """
        for guess in draft.guesses:
            right = guess.place < matched
            counts = self.counts[guess.drafter]
            counts.drafted, counts.accepted = counts.drafted + 1, counts.accepted + right
            if guess.place <= matched and guess.place < came:
                record = self._records[guess.drafter, guess.evidence]
                record.right, record.tried = record.right * _KEPT + right, record.tried * _KEPT + 1
                progress.hoped = progress.hoped * _KEPT_OF_ROW + guess.chance
                progress.right = progress.right * _KEPT_OF_ROW + right

    def stats(self) -> dict[str, dict[str, int]]:
        """Counts by drafter, as plain data."""
        return {name: asdict(counts) for name, counts in self.counts.items()}

    # ------------------------------------------------------------------------------------------------- drafters

    def observe(self, request: Request, known: Ints) -> None:
        """Takes the tokens of a request that drafters have not seen, which they learn with the next `learn`.

        Args:
            request: the request.
            known: all its tokens, prompt included.
        """
        start = max(request.output.draft.learned, request.prompt_len)
        request.output.draft.learned = len(known)
        if start < len(known):
            first = max(start - TAIL, 0)
            self._unlearned.append((request, known[first:].tolist(), start - first))

    def learn(self) -> None:
        """Lets drafters learn what was observed."""
        for request, text, start in self._unlearned:
            for drafter in self._drafters:
                try:
                    drafter.learn(request, text, start)
                except Exception:  # requests go on without it
                    self._turn_off(drafter)
        self._unlearned = []

    def _guessers(self, request: Request, known: Ints) -> list[tuple[Drafter, Guesser]]:
        found: list[tuple[Drafter, Guesser]] = []
        for drafter in self._drafters:
            try:
                if drafter.drafts(request):
                    found.append((drafter, drafter.guesser(request, known, self._chances[drafter.name])))
            except Exception:
                self._turn_off(drafter)
        return found

    def _guesses(
        self, guessers: Sequence[tuple[Drafter, Guesser]], text: Sequence[int], state: Hashable
    ) -> list[tuple[float, str, Guess]]:
        """Guesses of the next token with their chances and the names of their drafters, the likeliest first."""
        found: list[tuple[float, str, Guess]] = []
        for drafter, guesser in guessers:
            try:
                guess = guesser(text, state)
            except Exception:
                self._turn_off(drafter)
                continue
            if guess is not None:
                found.append((self.chance(drafter.name, guess.evidence), drafter.name, guess))
        if len(found) > 1:
            found.sort(key=itemgetter(0), reverse=True)
        return found

    def _turn_off(self, drafter: Drafter) -> None:
        """Reports the exception that a drafter has raised, and asks it no more."""
        logger.exception("the drafter %r failed, and is off from now on", drafter.name)
        self._drafters = [other for other in self._drafters if other is not drafter]


def _share(record: _Record) -> float:
    """Share of right guesses, as expected of the next one."""
    return (record.right + 1) / (record.tried + 2)


_UNKNOWN = _share(_Record())


def _luck(progress: DraftProgress) -> float:
    """Number of right guesses of a row over what was expected of them, lately."""
    return (progress.right + 8) / (progress.hoped + 8)


_SLOPE = 0.05  # time of a token, as a share of a step's, before anything is known
_KEPT = 0.98  # weight of the steps before, for each new one
_MAX_TOKENS = 256  # larger steps tell nothing about those with a few tokens more


class StepCost:
    """Line through the durations of the last steps: a time for each step, and one for each of its tokens. If times were
    measured, the line is of what steps take beyond them."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # of 1, tokens, seconds, tokens², tokens * seconds
        self._step, self._token = 1.0, _SLOPE
        self._measured: list[float] = []  # by number of tokens
        self._sizes: list[int] = []  # numbers of tokens that were measured, ascending
        self._most = _MAX_TOKENS

    def set_measured(self, seconds: Mapping[int, float]) -> None:
        """Takes over measured times of steps by numbers of tokens. Other steps take as long as the next larger one."""
        self._sizes = counts = sorted(seconds)
        times = np.maximum.accumulate([seconds[count] for count in counts])
        self._measured, self._most = times[np.searchsorted(counts, np.arange(counts[-1] + 1))].tolist(), counts[-1]
        self._step = self._token = 0.0

    def record(self, tokens: int, seconds: float) -> None:
        """Records a step."""
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
            self._step, self._token = 1.0, _SLOPE

    def seconds(self, tokens: int) -> float:
        """Seconds of a step."""
        measured = self._measured[min(tokens, self._most)] if self._measured else 0.0
        return max(measured + self._step + self._token * tokens, 1e-9)

    def worth_asking(self, tokens: int, expected: float, likely: float, best: float) -> int:
        """Number of tokens up to which a step takes hardly longer than with one more; 0 if no larger step can give as
        many tokens a second as one that is known.

        Args:
            tokens: number of tokens of the step.
            expected: number of tokens that it is expected to give.
            likely: chance of each further token to be one of these, at most.
            best: tokens a second that are known.
        """
        sizes = self._sizes[bisect(self._sizes, tokens) :] or [tokens + 1]
        pays = any((expected + likely * (size - tokens)) / self.seconds(size) >= best for size in sizes)
        return sizes[0] if pays else 0
