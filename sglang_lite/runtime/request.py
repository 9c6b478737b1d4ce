"""A request: what is to be generated or scored, how far it is, and the one event that ends it."""

from __future__ import annotations

import enum
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_lite.protocol import ConstraintError, Delta, Generation, ModelError, SglError, TokenLogprob, Usage
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.store import SlotHandle
from sglang_lite.runtime.sampling_params import LogitProcessor, ResolvedParams
from sglang_lite.runtime.structured_output.base import Matcher, NumberSoFar
from sglang_lite.runtime.tokens.detokenize import IncrementalDecoder
from sglang_lite.runtime.tokens.token_log import kept_spans
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.text.stop import StopMatcher

logger = logging.getLogger("sglang_lite")

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

    __hash__ = object.__hash__  # an enumeration's own is Python


_ENDS = frozenset({State.FINISHED, State.ABORTED, State.FAILED})
_NEXT = {
    State.COMPILING: {State.WAITING} | _ENDS,
    State.WAITING: {State.PREFILLING} | _ENDS,
    State.PREFILLING: {State.DECODING, State.RETRACTED} | _ENDS,
    State.DECODING: {State.PREFILLING, State.RETRACTED} | _ENDS,
    State.RETRACTED: {State.PREFILLING} | _ENDS,
}


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a generation ended: see Generation."""

    reason: Literal["stop", "length", "abort"]
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
        processor: the caller's own change of its logits.
        namespace: of the prefix tree.
        score_from: report log-probabilities of prompt tokens from this position on; None: of none.
        holding: its slot and pages, while it runs.
        admission: when it was last started, as a running number.
        ending: it ends so as soon as its tokens are computed, without a draw.
        forced_tokens: output tokens that its grammar left no choice about and that took no step each.
        cached_tokens: prompt tokens found in the cache at first admission, -1 before.
        priority: higher ones are admitted first, where the policy says so.
        retractions: how often it was put back.
        passed_over: how many later requests were admitted before it.
        follow: makes of its result the request that goes on in its slot, or None; called on the loop's thread.
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
    processor: LogitProcessor | None = None
    namespace: str = ""
    score_from: int | None = None
    state: State = State.COMPILING
    holding: SlotHandle | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    admission: int = 0
    cached_tokens: int = -1
    ending: Finish | None = None
    forced_tokens: int = 0
    priority: int = 0
    retractions: int = 0
    passed_over: int = 0
    follow: Callable[[Generation], Request | None] | None = None
    submitted_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0
    first_token_at: float = 0.0
    _decoder: IncrementalDecoder = field(init=False)
    _stops: StopMatcher = field(init=False)
    _text: list[str] = field(default_factory=list)
    _decoded: int = 0
    _unsent: list[int] = field(default_factory=list)
    _sent: int = 0

    def __post_init__(self) -> None:
        self._decoder = IncrementalDecoder(self.tokenizer, skip_special=self.params.skip_special_tokens)
        self._stops = StopMatcher(self.params.stop, self.params.stop_regex)
        for byte in self._last_bytes():  # takes a while when a byte is new: not on the loop's thread
            self.tokenizer.tokens_with(byte)

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
        p = self.params
        return not p.plain or p.return_logprob or self.matcher is not None or self.processor is not None

    @property
    def masked_only(self) -> bool:
        """Its grammar alone has to see its tokens: their text is of no use before the end."""
        p = self.params
        others = self.stream or p.stop or p.stop_regex or p.stop_token_ids or p.min_tokens or p.return_logprob
        return self.matcher is not None and p.plain and not others and self.processor is None

    @property
    def watched(self) -> bool:
        """Each of its tokens must be looked at when it comes; else only the end of the sequence, the limit or a token
        that is `wanted` end it."""
        p = self.params
        unclear = any(stop[-1] == "\ufffd" for stop in p.stop)  # which no byte spells
        return self.stream or self.special or unclear or bool(p.stop_regex or p.stop_token_ids)

    @property
    def wanted(self) -> NDArray[np.bool_] | None:
        """The tokens that have to be looked at, where not all [vocab_size]: only one that has the last byte of a stop
        string can complete it. None where no stop string may end it."""
        if self.watched or not self.params.stop:
            return None
        wanted: NDArray[np.bool_] = np.logical_or.reduce([self.tokenizer.tokens_with(b) for b in self._last_bytes()])
        return wanted

    def _last_bytes(self) -> list[int]:
        return [stop.encode("utf-8", "surrogatepass")[-1] for stop in self.params.stop]

    def untaken(self, known: Ints) -> Sequence[int]:
        """Those of its tokens that were not looked at."""
        tokens: list[int] = known[self.prompt_len + self._decoded :].tolist()
        return tokens

    def move(self, state: State) -> None:
        """Changes the state; a transition the table does not have is a bug in the scheduler."""
        if state not in _NEXT.get(self.state, ()):
            raise AssertionError(f"request {self.id}: {self.state.value} → {state.value}")
        self.state = state
        self.retractions += state is State.RETRACTED

    def take(self, tokens: Sequence[int], logprob: TokenLogprob | None) -> Finish | None:
        """Looks at the next tokens, of which only the last one may end it: grammar, text, stops. Sends a delta where
        they are wanted.

        Raises:
            ConstraintError: the grammar does not allow the token.
            ParameterError: a stop pattern takes too long.
        """
        token = tokens[-1]
        if logprob is not None:
            self.logprobs.append(self._with_text(logprob))
        ends = self._ends_at(token)
        complete = self.matcher is not None and self._accept(self.matcher, token)
        if ends:
            return Finish("stop", token)
        piece = self._decoder.push(tokens) if self._number is None else self._number.take()
        certain = self._stops.push(piece) if self._decoded >= self.params.min_tokens else self._stops.skip(piece)
        self._decoded += len(tokens)
        self._unsent += tokens
        self._add(certain)
        if self._stops.matched is not None:
            return Finish("stop", self._stops.matched)
        return Finish("stop", None) if complete else None

    def take_masked(self, token: int) -> Finish | None:
        """`take` where the request is `masked_only`."""
        assert self.matcher is not None
        ends = self._ends_at(token)
        complete = self._accept(self.matcher, token)
        if ends:
            return Finish("stop", token)
        return Finish("stop", None) if complete else None

    def _ends_at(self, token: int) -> bool:
        """The token that comes next ends it. Inside of its grammar the model's own end is text, if it spells any."""
        if token not in self.ends:
            return False
        return self.matcher is None or token in self.params.stop_token_ids or self.matcher.complete

    @property
    def _number(self) -> NumberSoFar | None:
        """Its text, where that is a number: less than its tokens say."""
        return None if self.matcher is None else self.matcher.number

    @staticmethod
    def _accept(matcher: Matcher, token: int) -> bool:
        """Says whether nothing but the end can follow."""
        try:
            if matcher.accept(token):
                return matcher.finished
        except Exception as error:  # a library's, which must not end the loop
            raise _engine_failed(matcher, error) from error
        raise ConstraintError(f"the constraint allows no continuation: {matcher.error}")

    def jump(self, most: int) -> tuple[list[int], Finish | None]:
        """Takes the tokens that its grammar forces, at most so many, and may end with the last of them. Fewer than two
        are not worth it: they take a step in any case.

        Raises:
            as `take`.
        """
        if self.matcher is None or self.processor is not None or self.params.return_logprob:
            return [], None
        try:
            forced = self.matcher.forced()[: max(most, 0)]
        except Exception as error:  # a library's
            raise _engine_failed(self.matcher, error) from error
        finish: Finish | None = None
        if len(forced) < 2:
            return [], None
        masked_only = self.masked_only
        for count, token in enumerate(forced, 1):
            finish = self.take_masked(token) if masked_only else self.take((token,), None)
            if finish is not None:
                forced = forced[:count]
                break
        self.forced_tokens += len(forced)
        return forced, finish

    def tell(self, event: Event) -> None:
        """Hands an event to the sink. One that fails must not stop the other requests."""
        try:
            self.sink(event)
        except Exception:  # the caller's code
            logger.exception("the sink of request %d failed", self.id)

    def score(self, first: int, logprobs: list[TokenLogprob]) -> None:
        """Takes the log-probabilities of prompt tokens from position `first` on. A retraction may bring some again.

        Raises:
            ModelError: there are none.
        """
        assert self.score_from is not None
        for position, entry in enumerate(logprobs, first):
            if entry.logprob is None or math.isnan(entry.logprob):
                raise not_finite(position)
        known = max(self.score_from, 1) + len(self.prompt_logprobs)
        self.prompt_logprobs += logprobs[known - first :]

    def generation(self, finish: Finish) -> Generation:
        """The result. Called once, after the request was let go, when `tokens` is complete."""
        output = tuple(self.tokens[self.prompt_len :].tolist())
        params, number = self.params, self._number
        written, logprobs = output, self.logprobs
        if number is not None:
            number.close()
            written, logprobs = output[: number.tokens], logprobs[: number.tokens]
            rest = number.take()
        else:
            if isinstance(finish.matched, int):  # a token, which is kept if it is wanted and is text
                stop = self.tokenizer.decode(output[-1:], skip_special=params.skip_special_tokens)
                written = output if stop and params.include_stop else output[:-1]
            rest = self._decoder.push(written[self._decoded :])  # and nothing of a character that has only begun
        if self._stops.matched is None:
            self._add(self._stops.flush() + rest)
        elif params.include_stop:
            self._add(self._stops.matched_text)
        text = "".join(self._text)
        chosen = {} if self.matcher is None else {"constraint_backend": self.matcher.engine.name}
        return Generation(
            text=text,
            token_ids=output,
            spans=kept_spans(self.tokenizer, written, text, skip_special=params.skip_special_tokens),
            finish_reason=finish.reason,
            matched=finish.matched,
            usage=self._usage(len(output)),
            output_logprobs=tuple(logprobs),
            prompt_logprobs=tuple(map(self._with_text, self.prompt_logprobs)),
            meta={"num_retractions": self.retractions, **chosen},
        )

    def _add(self, text: str) -> None:
        """Adds to the result what is certain, and sends it."""
        if not text:
            return
        self._text.append(text)
        if self.stream:
            count = len(self._unsent) if self._number is None else self._number.tokens - self._sent
            ids, self._unsent = tuple(self._unsent[:count]), self._unsent[count:]
            logprobs = tuple(self.logprobs[self._sent : self._sent + len(ids)]) if self.logprobs else ()
            self._sent += len(ids)
            self.tell(Delta(text, ids, logprobs))

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
            forced_tokens=self.forced_tokens,
            queue_s=(self.started_at or now) - self.submitted_at,
            first_token_s=(self.first_token_at or now) - self.submitted_at,
            total_s=now - self.submitted_at,
        )


def _engine_failed(matcher: Matcher, error: Exception) -> ConstraintError:
    return ConstraintError(
        f"{matcher.engine.name} failed: {error!r}", hint="Another engine may not: constraint_backend."
    )


def not_finite(position: int) -> ModelError:
    """The error of a request for which the model gave no valid number."""
    return ModelError(
        f"the model's logits for position {position} are NaN or infinite.",
        hint="Its weights may be damaged; float16 overflows in some models: use bfloat16 or float32.",
    )
