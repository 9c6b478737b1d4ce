"""Drafts of rows: takes the best guess of all drafters, token by token, as long as it is likely enough to pay."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import itemgetter
from typing import TypeVar

import numpy as np

from sglang_lite.runtime.drafting.draft import Draft, DraftedGuess, DraftWriter
from sglang_lite.runtime.drafting.guess import Drafter, Guess, Guesser
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.output_builder import DraftProgress
from sglang_lite.runtime.requests.request import Request

logger = logging.getLogger("sglang_lite")

T = TypeVar("T")
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

    def drafts(self, request: Request) -> bool:
        """False if no drafter has guesses for any text of the request."""
        if self._of_grammars and request.output.matcher is None:  # asked of each row in each step
            return False
        return any(drafter.drafts(request) for drafter in self._drafters)

    def draft(self, request: Request, known: Ints, room: int, tokens: int, expected: float) -> tuple[Draft, float]:
        """Draft of a row, maybe empty, and the number of tokens that it is expected to save steps for.

        Args:
            request: request of the row.
            known: all its tokens, prompt included.
            room: maximum number of tokens.
            tokens: number of tokens of the step so far.
            expected: number of tokens that it is expected to give.
        """
        self.observe(request, known)
        matcher = request.output.matcher
        start = None if matcher is None else matcher.copy()
        drafts = request.params.speculation and request.processor is None and (matcher is None or start is not None)
        writer = DraftWriter(start, room if drafts else 0, jump=self._jump and not request.params.scores_tokens)
        text: list[int] = known[-TAIL:].tolist() if writer.is_open else []
        guessers = self._guessers(request, known) if writer.is_open else {}
        guesses: list[DraftedGuess] = []
        likely, gain, luck = 1.0, 0.0, _luck(request.output.draft)
        while writer.is_open and len(guesses) < self.most:
            least = self.cost.least_chance(tokens + len(writer.tokens), expected + gain) / likely
            written = self._append(writer, guesses, request, self._guesses(guessers, text), least / luck)
            if not written:
                break
            likely *= min(guesses[-1].chance * luck, 1.0)
            gain += likely
            text += written
        return writer.draft(tuple(guesses)), gain

    def _append(
        self, writer: DraftWriter, guesses: list[DraftedGuess], request: Request,
        found: list[tuple[float, str, Guess]], least: float,
    ) -> list[int]:  # fmt: skip
        """Appends the likeliest guess that may come, if its chance is at least `least`. Returns what was written."""
        for chance, name, (token, evidence) in found:
            if not 0 <= token < self._vocab_size or token in self._eos_ids or token in request.output.ends:
                continue  # nothing may follow it
            if chance < least:
                record = self._records[name, evidence]
                record.right, record.tried = record.right * _KEPT_UNTRIED, record.tried * _KEPT_UNTRIED
                return []
            index = len(writer.tokens)
            if written := writer.append(token):
                guesses.append(DraftedGuess(index, name, evidence, chance))
                return written
        return []

    def chance(self, drafter: str, evidence: int) -> float:
        """Share of a drafter's guesses of the same evidence that were right."""
        record = self._records[drafter, evidence]
        return (record.right + 1) / (record.tried + 2)

    def record(self, draft: Draft, came: Sequence[int], progress: DraftProgress) -> int:
        """Records what came in the place of a draft, of which more may be known than the draft has, also in the
        progress of its request. Returns the number of its first tokens that were right."""
        tokens = draft.tokens.tolist()
        matched = next((i for i, (a, b) in enumerate(zip(tokens, came)) if a != b), min(len(tokens), len(came)))
        for guess in draft.guesses:
            self.counts[guess.drafter].drafted += 1
            self.counts[guess.drafter].accepted += guess.index < matched
            if guess.index <= matched and guess.index < len(came):
                record = self._records[guess.drafter, guess.evidence]
                record.right = record.right * _KEPT + (guess.index < matched)
                record.tried = record.tried * _KEPT + 1
                progress.hoped = progress.hoped * _KEPT_OF_ROW + guess.chance
                progress.right = progress.right * _KEPT_OF_ROW + (guess.index < matched)
        return matched

    def stats(self) -> dict[str, dict[str, int]]:
        """Counts by drafter, as plain data."""
        return {name: asdict(counts) for name, counts in self.counts.items()}

    # ------------------------------------------------------------------------------------------------- drafters

    def observe(self, request: Request, known: Ints) -> None:
        """Lets drafters learn the tokens of a request that they have not seen.

        Args:
            request: the request.
            known: all its tokens, prompt included.
        """
        start = max(request.output.draft.learned, request.prompt_len)
        request.output.draft.learned = len(known)
        if start < len(known):
            first = max(start - TAIL, 0)
            text: list[int] = known[first:].tolist()
            for drafter in self._drafters:
                self._ask(drafter, partial(drafter.learn, request, text, start - first))

    def _guessers(self, request: Request, known: Ints) -> dict[Drafter, Guesser]:
        made = {
            drafter: self._ask(drafter, partial(drafter.guesser, request, known, partial(self.chance, drafter.name)))
            for drafter in self._drafters
            if drafter.drafts(request)
        }
        return {drafter: guesser for drafter, guesser in made.items() if guesser is not None}

    def _guesses(self, guessers: dict[Drafter, Guesser], text: Sequence[int]) -> list[tuple[float, str, Guess]]:
        """Guesses of the next token with their chances and the names of their drafters, the likeliest first."""
        found: list[tuple[float, str, Guess]] = []
        for drafter, guesser in guessers.items():
            guess = self._ask(drafter, partial(guesser, text))
            if guess is not None:
                found.append((self.chance(drafter.name, guess.evidence), drafter.name, guess))
        found.sort(key=itemgetter(0), reverse=True)
        return found

    def _ask(self, drafter: Drafter, question: Callable[[], T]) -> T | None:
        """Answer of a drafter, or None if it fails."""
        try:
            return question()
        except Exception:  # requests go on without it
            logger.exception("the drafter %r failed, and is off from now on", drafter.name)
            self._drafters = [other for other in self._drafters if other is not drafter]
            return None


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
        self._most = _MAX_TOKENS

    def set_measured(self, seconds: Mapping[int, float]) -> None:
        """Takes over measured times of steps by numbers of tokens, more than one."""
        counts = sorted(seconds)
        times = np.maximum.accumulate([seconds[count] for count in counts])
        self._measured, self._most = np.interp(np.arange(counts[-1] + 2), counts, times).tolist(), counts[-1]
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
        return measured + self._step + self._token * tokens

    def least_chance(self, tokens: int, expected: float) -> float:
        """Chance of being right that one more drafted token needs, to add more to what the step is expected to give
        than to its time.

        Args:
            tokens: number of tokens of the step so far.
            expected: number of tokens that it is expected to give.
        """
        seconds = self.seconds(tokens)
        return (self.seconds(tokens + 1) - seconds) * expected / max(seconds, 1e-9)
