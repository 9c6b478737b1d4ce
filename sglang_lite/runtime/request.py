"""A request: what is to be generated or scored, how far it is, and the one event that ends it."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from sglang_lite.protocol import ConstraintError, Delta, Generation, SglError, TokenLogprob, Usage
from sglang_lite.runtime.cache.pages import Ints
from sglang_lite.runtime.cache.store import Holding
from sglang_lite.runtime.grammar.base import Matcher
from sglang_lite.runtime.sampling_params import ResolvedParams
from sglang_lite.runtime.tokens.detokenize import IncrementalDecoder
from sglang_lite.runtime.tokens.token_log import kept_spans
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.text.stop import StopMatcher

Event: TypeAlias = Delta | Generation | SglError
Sink: TypeAlias = Callable[[Event], None]
Top: TypeAlias = tuple[tuple[float, int, str | None], ...]


class State(enum.Enum):
    """Where a request is. The last three are ends: each request reaches exactly one of them, once."""

    COMPILING = "compiling"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    RETRACTED = "retracted"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


_ENDS = frozenset({State.FINISHED, State.ABORTED, State.FAILED})
_NEXT = {
    State.COMPILING: {State.WAITING} | _ENDS,
    State.WAITING: {State.PREFILLING} | _ENDS,
    State.PREFILLING: {State.DECODING, State.RETRACTED} | _ENDS,
    State.DECODING: {State.RETRACTED} | _ENDS,
    State.RETRACTED: {State.PREFILLING} | _ENDS,
}


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a generation ended: see Generation."""

    reason: Literal["stop", "length"]
    matched: str | int | None


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
        sink: gets the events, on the loop's thread; the last one is a Generation or an SglError.
        ends: ids that end it.
        stream: deltas are wanted.
        matcher: its place in its grammar, None without one.
        namespace: of the prefix tree.
        score_from: report log-probabilities of prompt tokens from this position on; None: of none.
        holding: its slot and pages, while it runs.
        admission: when it was last started, as a running number.
        cached_tokens: prompt tokens found in the cache at first admission, -1 before.
    """

    id: int
    tokens: Ints
    prompt_len: int
    limit: int
    params: ResolvedParams
    seed: int
    sink: Sink
    tokenizer: Tokenizer
    ends: frozenset[int]
    stream: bool = False
    matcher: Matcher | None = None
    namespace: str = ""
    score_from: int | None = None
    state: State = State.COMPILING
    holding: Holding | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    admission: int = 0
    cached_tokens: int = -1
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0
    first_token_at: float = 0.0
    _decoder: IncrementalDecoder = field(init=False)
    _stops: StopMatcher = field(init=False)
    _text: list[str] = field(default_factory=list)
    _taken: int = 0
    _unsent: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._decoder = IncrementalDecoder(self.tokenizer)
        self._stops = StopMatcher(self.params.stop)

    @property
    def slot(self) -> int:
        assert self.holding is not None
        return self.holding.slot

    @property
    def ended(self) -> bool:
        return self.state in _ENDS

    @property
    def special(self) -> bool:
        """Its draws need more than the sampling table."""
        return self.matcher is not None or not self.params.plain or self.params.return_logprob

    @property
    def watched(self) -> bool:
        """Each of its tokens must be looked at when it comes; else only the end-of-sequence and the limit end it."""
        p = self.params
        return self.stream or self.special or bool(p.stop or p.stop_token_ids)

    def move(self, state: State) -> None:
        """Changes the state; a transition the table does not have is a bug in the scheduler."""
        if state not in _NEXT.get(self.state, ()):
            raise AssertionError(f"request {self.id}: {self.state.value} → {state.value}")
        self.state = state

    def take(self, token: int, logprob: TokenLogprob | None) -> Finish | None:
        """Looks at the next token: grammar, text, stops. Sends a delta where they are wanted.

        Raises:
            ConstraintError: the grammar does not allow the token.
        """
        self._taken += 1
        if logprob is not None:
            self.logprobs.append(self._with_text(logprob))
        if self.matcher is not None and not self.matcher.accept(token):
            raise ConstraintError(f"the constraint allows no continuation: {self.matcher.error}")
        if token in self.ends:
            return Finish("stop", token)
        self._unsent.append(token)
        piece = self._decoder.push((token,))
        certain = self._stops.push(piece) if self._taken > self.params.min_tokens else piece
        if certain:
            self._text.append(certain)
            if self.stream:
                self.sink(Delta(certain, tuple(self._unsent), tuple(self.logprobs[-len(self._unsent) :])))
                self._unsent.clear()
        if self._stops.matched is not None:
            return Finish("stop", self._stops.matched)
        if self.matcher is not None and self.matcher.finished:
            return Finish("stop", None)
        return None

    def generation(self, finish: Finish) -> Generation:
        """The result. Called once, after the request was let go, when `tokens` is complete."""
        output = tuple(self.tokens[self.prompt_len :].tolist())
        written = output[:-1] if isinstance(finish.matched, int) else output
        if not self.watched:
            self._text.append(self._decoder.push(written))
        if self._stops.matched is None:
            rest = self._stops.push(self._decoder.flush()) + self._stops.flush()
        else:
            rest = self._stops.matched if self.params.include_stop else ""
        if rest:
            self._text.append(rest)
            if self.stream:
                self.sink(Delta(rest, tuple(self._unsent)))
        text = "".join(self._text)
        return Generation(
            text=text,
            token_ids=output,
            spans=kept_spans(self.tokenizer, written, text),
            finish_reason=finish.reason,
            matched=finish.matched,
            usage=self._usage(len(output)),
            output_logprobs=tuple(self.logprobs),
            prompt_logprobs=tuple(self.prompt_logprobs),
        )

    def _with_text(self, logprob: TokenLogprob) -> TokenLogprob:
        if not self.params.return_text_in_logprobs:
            return logprob

        def spelled(entries: Top) -> Top:
            return tuple((value, i, self.tokenizer.decode((i,), skip_special=False)) for value, i, _ in entries)

        text = self.tokenizer.decode((logprob.token_id,), skip_special=False)
        return TokenLogprob(logprob.logprob, logprob.token_id, text, spelled(logprob.top), spelled(logprob.ids))

    def _usage(self, completion_tokens: int) -> Usage:
        now = time.perf_counter()
        return Usage(
            prompt_tokens=self.prompt_len,
            cached_tokens=max(self.cached_tokens, 0),
            completion_tokens=completion_tokens,
            queue_s=(self.started_at or now) - self.submitted_at,
            first_token_s=(self.first_token_at or now) - self.submitted_at,
            total_s=now - self.submitted_at,
        )
