"""A request: what is to be generated or scored, and how far it is. Its output is assembled in output_builder.py."""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_lite.protocol import Generation, ModelError, TokenLogprob, Usage
from sglang_lite.runtime.kv_cache.cache_miss import Miss
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import SlotHandle
from sglang_lite.runtime.output_builder import Finish, OutputBuilder
from sglang_lite.runtime.resolved_params import LogitProcessor, ResolvedParams
from sglang_lite.runtime.schedule_hints import ScheduleHints
from sglang_lite.runtime.structured_output.base import Matcher


class State(enum.Enum):
    """Stage of a request. The last three are ends: each request reaches exactly one of them, once."""

    COMPILING = "compiling"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    RETRACTED = "retracted"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    __hash__ = object.__hash__  # an enumeration's own is Python


_ENDS = frozenset({State.FINISHED, State.ABORTED, State.FAILED})
_NEXT = {
    State.COMPILING: {State.WAITING} | _ENDS,
    State.WAITING: {State.PREFILLING} | _ENDS,
    State.PREFILLING: {State.DECODING, State.RETRACTED} | _ENDS,
    State.DECODING: {State.PREFILLING, State.RETRACTED} | _ENDS,
    State.RETRACTED: {State.PREFILLING} | _ENDS,
}


class WatchedTokens(enum.IntEnum):
    """Selection of a request's new tokens that the host must look at when they come. At the model's end of sequence,
    and at the last token before the limit, it looks in any case."""

    ENDS = 0  # no others
    STOPS = 1  # those that can complete a stop string: `OutputBuilder.stop_tokens`
    TEXT = 2  # all, as text
    GRAMMAR = 3  # all, for the grammar alone: their text is of no use before the end
    DRAWS = 4  # all, as text, and as its draws need more than the sampling table and masks


class StreamPace(enum.IntEnum):
    """Times at which tokens are looked at that only a request's stream wants to see."""

    NONE = 0  # never
    AT_ONCE = 1  # the first one
    NOW_AND_THEN = 2  # those that follow


@dataclass(slots=True)
class Times:
    """Times of a request, by `time.perf_counter()`; 0.0: not yet."""

    submitted: float = field(default_factory=time.perf_counter)
    started: float = 0.0
    first_token: float = 0.0


@dataclass(eq=False, slots=True)
class Request:
    """
    Attributes:
        id: unique in its engine.
        tokens: the prompt, and after a retraction what was generated too. While the request runs, the slot table has
            the tokens.
        prompt_len: how many of them are the prompt.
        limit: length in tokens, prompt included, at which it ends.
        params: resolved.
        seed: of its draws, as an unsigned 64-bit number.
        output: assembles what it generates, and hands it to its sink.
        processor: the caller's own change of its logits.
        namespace: of the prefix tree.
        score_from: report log-probabilities of prompt tokens from this position on; None: of none.
        holding: its slot and pages, while it runs.
        admission: when it was last started, as a running number.
        ending: it ends so as soon as its tokens are computed, without a draw.
        cached_tokens: prompt tokens found in the cache at first admission, -1 before.
        miss: why the others were not; None: there are none, or it continues in another one's slot.
        jumps: where in its output its grammar's forced tokens were appended, and how many.
        priority: higher ones are admitted first, where the policy says so.
        retractions: how often it was put back.
        passed_over: how many later requests were admitted before it.
        given: how many ids of its output `tokens` began with: those that an earlier stream has brought.
        paced: its deltas need not be told at every step, unless each of its tokens is looked at anyway.
        prospect: of the program's branch that it is of.
        follow: makes of its result the request that continues in its slot, or None; called on the loop's thread.
    """

    id: int
    tokens: Ints
    prompt_len: int
    limit: int
    params: ResolvedParams
    seed: int
    output: OutputBuilder
    processor: LogitProcessor | None = None
    namespace: str = ""
    score_from: int | None = None
    state: State = State.COMPILING
    holding: SlotHandle | None = None
    admission: int = 0
    cached_tokens: int = -1
    miss: Miss | None = None
    jumps: list[tuple[int, int]] = field(default_factory=list)
    ending: Finish | None = None
    priority: int = 0
    retractions: int = 0
    passed_over: int = 0
    given: int = 0
    paced: bool = False
    prospect: ScheduleHints | None = None
    follow: Callable[[Generation], Request | None] | None = None
    times: Times = field(default_factory=Times)

    @property
    def slot(self) -> int:
        assert self.holding is not None
        return self.holding.slot

    @property
    def ended(self) -> bool:
        return self.state in _ENDS

    @property
    def only_scored(self) -> bool:
        """True where its last token need not be computed: nothing is drawn after it, and its own log-probability comes
        with the token before."""
        return self.limit == self.prompt_len and self.score_from is not None and self.score_from < self.prompt_len

    @property
    def look(self) -> WatchedTokens:
        """Selection of its new tokens that the host must look at."""
        return self._look(self.output.matcher)

    def _look(self, matcher: Matcher | None) -> WatchedTokens:
        p, output = self.params, self.output
        if matcher is not None and p.plain and self.processor is None:
            others = output.stream or p.stop or p.stop_regex or p.stop_token_ids or p.min_tokens or p.return_logprob
            return WatchedTokens.DRAWS if others else WatchedTokens.GRAMMAR
        if matcher is not None or not p.plain or p.return_logprob or self.processor is not None:
            return WatchedTokens.DRAWS
        unclear = any(stop[-1] == "\ufffd" for stop in p.stop)  # which no byte spells
        if (output.stream and not self.paced) or unclear or p.stop_regex or p.stop_token_ids:
            return WatchedTokens.TEXT
        return WatchedTokens.STOPS if p.stop else WatchedTokens.ENDS

    def resume(self, matcher: Matcher | None, *, jump: bool) -> None:
        """Brings its output to the end of the ids that it was given, before it is submitted: off the loop's thread, as
        it may take long.

        Args:
            matcher: at the beginning of its grammar.
            jump: tokens that the grammar forces are appended as a whole.

        Raises:
            ParameterError: no output begins with these ids.
        """
        output, forced, ending = self.output.replayed(
            self.tokens[self.prompt_len :].tolist(),
            self.limit - self.prompt_len,
            matcher,
            jump=jump and self.processor is None,
            masked=self._look(matcher) is WatchedTokens.GRAMMAR,
        )
        if forced:
            self.tokens = np.concatenate((self.tokens, np.array(forced, dtype=np.int32)))
        self.output, self.ending = output, ending

    @property
    def repeats(self) -> bool:
        """True where its last token may have to be computed again, as the mask for the next one was late."""
        return self.output.matcher is not None

    def untaken(self, known: Ints) -> Sequence[int]:
        """Tokens of the request that were not looked at."""
        tokens: list[int] = known[self.prompt_len + self.output.taken :].tolist()
        return tokens

    def move(self, state: State) -> None:
        """Changes the state; a transition the table does not have is a bug in the scheduler."""
        if state not in _NEXT.get(self.state, ()):
            raise AssertionError(f"request {self.id}: {self.state.value} → {state.value}")
        self.state = state
        self.retractions += state is State.RETRACTED

    def jump(self, most: int) -> tuple[list[int], Finish | None]:
        """Takes the tokens that its grammar forces, as `OutputBuilder.jump`: none where a processor has to see each."""
        if self.processor is not None:
            return [], None
        tokens, finish = self.output.jump(most, masked=self.look is WatchedTokens.GRAMMAR)
        if tokens:
            self.jumps.append((self.limit - self.prompt_len - most, len(tokens)))
        return tokens, finish

    def score(self, first: int, logprobs: list[TokenLogprob]) -> None:
        """Takes the log-probabilities of prompt tokens from position `first` on. A retraction may bring some again.

        Raises:
            ModelError: there are none.
        """
        assert self.score_from is not None
        for position, entry in enumerate(logprobs, first):
            if entry.logprob is None or math.isnan(entry.logprob):
                raise not_finite(position)
        known = max(self.score_from, 1) + len(self.output.prompt_logprobs)
        self.output.prompt_logprobs += logprobs[known - first :]

    def generation(self, finish: Finish) -> Generation:
        """The result. Called once, after the request was let go, when `tokens` is complete."""
        output = tuple(self.tokens[self.prompt_len : self.prompt_len + self.params.max_tokens].tolist())
        usage = self._usage(len(output))
        return self.output.generation(output, finish, usage, self.retractions, miss=self.miss, jumps=self.jumps)

    def _usage(self, completion_tokens: int) -> Usage:
        now = time.perf_counter()
        return Usage(
            prompt_tokens=self.prompt_len,
            cached_tokens=max(self.cached_tokens, 0),
            completion_tokens=completion_tokens,
            forced_tokens=self.output.forced_tokens,
            queue_s=(self.times.started or now) - self.times.submitted,
            first_token_s=(self.times.first_token or now) - self.times.submitted,
            total_s=now - self.times.submitted,
        )


def not_finite(position: int) -> ModelError:
    """The error of a request for which the model gave no valid number."""
    return ModelError(
        f"the model's logits for position {position} are NaN or infinite.",
        hint="Its weights may be damaged; float16 overflows in some models: use bfloat16 or float32.",
    )
