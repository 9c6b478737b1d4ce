"""Request: what to generate or score, and its progress. Its output is assembled in
output_builder.py.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from sglang_lite.constraints.json_schema.repeats import build_repeat_rules
from sglang_lite.protocol import Constraint, Generation, ModelError, TokenLogprob, Usage
from sglang_lite.runtime.kv_cache.cache_miss import Miss
from sglang_lite.runtime.kv_cache.page_source import PromisedPages
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import SlotHandle
from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace
from sglang_lite.runtime.requests.bad_words import BadWords
from sglang_lite.runtime.requests.cut_text import CutText
from sglang_lite.runtime.requests.logit_processors import LogitProcessor, LogitReader
from sglang_lite.runtime.requests.output_builder import Finish, OutputBuilder, grammar_engine_error
from sglang_lite.runtime.requests.request_media import RequestMedia
from sglang_lite.runtime.requests.resolved_params import ResolvedParams
from sglang_lite.runtime.requests.scheduled_branch import ScheduledBranch
from sglang_lite.runtime.structured_output.base import CompiledGrammar, Matcher
from sglang_lite.runtime.structured_output.open_end import OpenEndGrammar
from sglang_lite.runtime.structured_output.repeated_items import RepeatGuard
from sglang_lite.runtime.structured_output.request_matcher import RequestMatcher
from sglang_lite.runtime.structured_output.shortest import fewest_tokens_above


class State(enum.Enum):
    """Stage of a request. The last three are final: each request reaches exactly one of them, once."""

    COMPILING = "compiling"
    PREPARING = "preparing"
    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    RETRACTED = "retracted"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    __hash__ = object.__hash__  # faster than the hash of Enum, which is written in Python


_ENDS = frozenset({State.FINISHED, State.ABORTED, State.FAILED})
_NEXT = {
    State.COMPILING: {State.PREPARING, State.WAITING} | _ENDS,
    State.PREPARING: {State.WAITING} | _ENDS,
    State.WAITING: {State.PREFILLING} | _ENDS,
    State.PREFILLING: {State.DECODING, State.RETRACTED} | _ENDS,
    State.DECODING: {State.PREFILLING, State.RETRACTED} | _ENDS,
    State.RETRACTED: {State.PREFILLING} | _ENDS,
}


class WatchedTokens(enum.IntEnum):
    """Kinds of new tokens that the host must inspect when they arrive. In addition, the host always
    inspects end-of-sequence tokens and the last token before the limit.
    """

    ENDS = 0  # no others
    STOPS = 1  # tokens that can complete a stop string: `OutputBuilder.build_stop_string_mask`
    TEXT = 2  # all tokens, as text
    GRAMMAR = 3  # all tokens, only for the grammar: their text is not needed before the end
    DRAWS = 4  # all tokens, as text; in addition, draws need more than the sampling table and masks


class StreamPace(enum.IntEnum):
    """How often the host inspects new tokens just because the request is streamed."""

    NONE = 0  # never
    FIRST_TOKEN = 1  # at the first token
    INTERVAL = 2  # at the following tokens, once per stream interval


@dataclass(slots=True)
class Times:
    """Times of a request on the clock `time.perf_counter()`; 0.0 for an event that has not happened
    yet.

    A constrained output must be complete before `deadline`; None for no limit. If `winds_down` is
    set, the output ends at the first place where a limit may cut it. `queued` is on the scheduler's
    clock.
    """

    submitted: float = field(default_factory=time.perf_counter)
    queued: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    deadline: float | None = None
    winds_down: bool = False


@dataclass(slots=True)
class CacheUse:
    """A request's use of the cache.

    Attributes:
        tokens: prompt tokens found in the cache at the first admission; -1 before.
        miss: reason why the other prompt tokens were not cached; None if all but the last were.
        promise: the source's last promise of pages of the prompt, if any.
        host_tokens, disk_tokens: how many of `tokens` were copied from the host, and read from
            files.
    """

    tokens: int = -1
    miss: Miss | None = None
    promise: PromisedPages | None = None
    host_tokens: int = 0
    disk_tokens: int = 0

    def record_promise(self, promise: PromisedPages, page_size: int) -> None:
        """Records a source's promise of pages."""
        if promise is not self.promise and self.tokens < 0:
            self.disk_tokens += promise.from_files * page_size
            self.host_tokens += promise.from_host * page_size
        self.promise = promise

    def record_admission(self, tokens: int) -> None:
        """Records the number of cached tokens at the first admission."""
        self.tokens = tokens
        self.disk_tokens = min(self.disk_tokens, tokens)
        self.host_tokens = min(self.host_tokens, tokens - self.disk_tokens)


class Follower(Protocol):
    """Finds the next request of a program, which continues in the slot of the request that has
    ended. All calls are made on the loop's thread.
    """

    def begin_next_request(
        self, tokens: Ints, finish: Finish, postpone: Callable[[], Callable[[], None]]
    ) -> Request | None:
        """Begins the next request, if one is prepared, before the result of the ended one is built.

        Args:
            tokens: all tokens of the request that has ended.
            finish: reason for its end.
            postpone: function that postpones building the ended request's result and calling
                `continue_program`. Returns a function that does both immediately. Called if the
                next request begins.

        Returns:
            The next request, or None. Its tokens begin with those of the ended request, possibly
            without the last one.
        """
        ...

    def continue_program(self, generation: Generation) -> Request | None:
        """Continues a program with the result of the request that has ended, and returns the
        program's next request. Returns None if there is no next request, or if `begin_next_request`
        has already begun it.
        """
        ...


@dataclass(eq=False, slots=True, weakref_slot=True)
class Request:
    """One generation, or the scoring of one choice.

    Attributes:
        id: number that is unique in the engine.
        tokens: int32 token ids of the prompt and, after a retraction, the generated tokens. While
            the request runs, the slot table holds the current ones.
        prompt_len: number of prompt tokens.
        limit: maximum length in tokens, prompt included.
        params: resolved sampling parameters.
        seed: seed of its draws, an unsigned 64-bit integer.
        output: builder of its output, which sends events to the sink.
        processor: the caller's logit processor, or a reader of the logits, if any.
        bad_words: sequences of tokens that its output may not have, if any.
        space: part of the prefix cache that its prefixes are in.
        score_from: first prompt position with a reported log-probability, or None to report none.
        state: current stage.
        handle: its slot and pages while it runs, otherwise None.
        admission: sequence number of its last admission.
        cache: its use of the cache.
        jumps: jumps of the grammar, as (index in the output, number of tokens).
        ending: reason for the end if it is known before the last tokens are computed; no token is
            drawn then.
        priority: priority of admission under the policy "priority"; higher first.
        retractions: number of retractions.
        passed_over: number of times that a later request was admitted first.
        replayed_count: number of output ids given by the caller, to continue an earlier stream.
        paced: whether its deltas may be delayed, so not every token has to be inspected for the
            stream.
        branch: program's branch that it belongs to, if any.
        follow: finds the next request of the program, which can continue in this request's slot;
            None if there is none.
        times: times of submission, start and first token.
        media: images of its prompt, if it has any.
        respelled: number of tokens at the end of the prompt that have to be replaced by other
            tokens for the same text before the request is submitted.
    """

    id: int
    tokens: Ints
    prompt_len: int
    limit: int
    params: ResolvedParams
    seed: int
    output: OutputBuilder
    processor: LogitProcessor | LogitReader | None = None
    bad_words: BadWords | None = None
    space: PrefixSpace = field(default_factory=PrefixSpace)
    score_from: int | None = None
    state: State = State.COMPILING
    handle: SlotHandle | None = None
    admission: int = 0
    cache: CacheUse = field(default_factory=CacheUse)
    jumps: list[tuple[int, int]] = field(default_factory=list)
    ending: Finish | None = None
    priority: int = 0
    retractions: int = 0
    passed_over: int = 0
    replayed_count: int = 0
    paced: bool = False
    branch: ScheduledBranch | None = None
    follow: Follower | None = None
    times: Times = field(default_factory=Times)
    media: RequestMedia | None = None
    respelled: int = 0

    @property
    def slot(self) -> int:
        assert self.handle is not None
        return self.handle.slot

    @property
    def ended(self) -> bool:
        return self.state in _ENDS

    @property
    def rank(self) -> tuple[int, float]:
        """Place among all requests, lowest first. It depends on the priority, and then on the
        arrival of the request's program or, without a program, of the request itself.
        """
        return -self.priority, self.id if self.branch is None else self.branch.program.arrival

    @property
    def skips_last_token(self) -> bool:
        """Whether the last token need not be computed. A request that only scores its prompt draws
        nothing after it, and the last token's log-probability comes from the token before.
        """
        return (
            self.limit == self.prompt_len
            and self.score_from is not None
            and self.score_from < self.prompt_len
        )

    @property
    def watched(self) -> WatchedTokens:
        """Kinds of its new tokens that the host must inspect."""
        return self._wrap_with_stop_watcher(self.output.matcher)

    def _wrap_with_stop_watcher(self, matcher: Matcher | None) -> WatchedTokens:
        p = self.params
        output = self.output
        if matcher is not None and p.plain and self.processor is None:
            others = (
                output.stream
                or p.stop
                or p.stop_regex
                or p.stop_token_ids
                or p.min_tokens
                or p.return_logprob
            )
            return WatchedTokens.DRAWS if others else WatchedTokens.GRAMMAR
        if matcher is not None or not p.plain or p.return_logprob or self.processor is not None:
            return WatchedTokens.DRAWS
        if p.confidence:
            return WatchedTokens.TEXT
        # U+FFFD stands for bytes that are not UTF-8
        unclear = any(stop[-1] == "\ufffd" for stop in p.stop)
        if (output.stream and not self.paced) or unclear or p.stop_regex or p.stop_token_ids:
            return WatchedTokens.TEXT
        return WatchedTokens.STOPS if p.stop else WatchedTokens.ENDS

    @property
    def scored(self) -> bool:
        """Whether each draw also reports the model's log-probability of the drawn token."""
        p = self.params
        asked = p.confidence or (p.return_logprob and self.output.matcher is not None)
        return asked and not p.scores_next_token

    def make_free_matcher(self) -> RequestMatcher | None:
        """Creates a matcher for an output without a grammar, which only limits the thoughts.
        Returns None if the thoughts have no limits.

        Raises:
            ParameterError: the model's template has no thoughts.
        """
        if self.output.thoughts is None or self.params.thinking is None:
            return None
        return RequestMatcher(self._limit_thoughts(self.output.thoughts.free_text.matcher(), None))

    def constrain(
        self, constraint: Constraint, grammar: CompiledGrammar, matcher: Matcher | None = None
    ) -> RequestMatcher:
        """Prepares the output for a constraint. Returns a matcher at the beginning of the output.

        Args:
            constraint: constraint of the output.
            grammar: its grammar.
            matcher: matcher at the grammar's beginning, if one was made in advance.

        Raises:
            ParameterError: the limit leaves nothing for thoughts.
        """
        limit = self.limit - self.prompt_len
        self.output.cut = CutText(constraint, limit, fewest_tokens_above(grammar, limit))
        rules = build_repeat_rules(constraint, self.params.repeats)
        guard = (
            None if rules is None else RepeatGuard(rules, grammar.endings(), self.output.text_of)
        )
        # only the end of sequence ends it
        if self.params.min_tokens and isinstance(grammar, OpenEndGrammar):
            grammar = grammar.inner
            matcher = None
        made = self._limit_thoughts(grammar.matcher() if matcher is None else matcher, grammar)
        return RequestMatcher(made, repeats=guard, sources=grammar.sources)

    def _limit_thoughts(self, matcher: Matcher, grammar: CompiledGrammar | None) -> Matcher:
        """Returns a matcher that also limits the output's thoughts, or `matcher` itself if these
        have no limits.

        Args:
            matcher: matcher at the output's beginning.
            grammar: its grammar; None for free text.
        """
        thoughts = self.output.thoughts
        if thoughts is None or self.params.scores_next_token:
            return matcher
        prompt = self.tokens[: self.prompt_len]
        total = self.limit - self.prompt_len
        return thoughts.limit_thoughts(
            matcher, grammar, self.params.thinking, total=total, prompt=prompt.tolist()
        )

    def must_redraw(self, token: int) -> bool:
        """Returns whether a drawn token has to be drawn again because it would repeat an item.

        Raises:
            ConstraintError: the grammar engine has failed.
        """
        matcher = self.output.matcher
        if matcher is None or token in self.output.ends:
            return False
        try:
            return matcher.refuses(token)
        except Exception as error:  # must not end the loop
            raise grammar_engine_error(matcher, error) from error

    def begin_with_given_text(self, matcher: RequestMatcher | None) -> None:
        """Processes the text that the output begins with, before the request is submitted. Can be
        slow, so must not be called on the loop's thread.

        Args:
            matcher: matcher at the beginning of its grammar, or None without a grammar.

        Raises:
            ConstraintError, ParameterError: like `OutputBuilder.read_given_text`.
        """
        self.ending = self.output.read_given_text(matcher)

    def replay_given_output(self, matcher: RequestMatcher | None, *, jump: bool) -> None:
        """Replays the output ids given by the caller, before the request is submitted. Can be slow,
        so must not be called on the loop's thread.

        Args:
            matcher: matcher at the beginning of its grammar, or None without a grammar.
            jump: whether forced tokens are appended as a whole.

        Raises:
            ParameterError: no output of the request begins with these ids.
        """
        output, forced, ending = self.output.rebuild_with_replay(
            self.tokens[self.prompt_len :].tolist(),
            self.limit - self.prompt_len,
            matcher,
            jump=jump and self.processor is None,
            masked=self._wrap_with_stop_watcher(matcher) is WatchedTokens.GRAMMAR,
        )
        if forced:
            self.tokens = np.concatenate((self.tokens, np.array(forced, dtype=np.int32)))
        self.output = output
        self.ending = ending

    @property
    def may_recompute_last_token(self) -> bool:
        """Whether the last token may have to be computed again. That happens if the mask for the
        next token was late.
        """
        return self.output.matcher is not None

    def undecoded_tokens(self, known: Ints) -> Sequence[int]:
        """Returns the tokens of the output that were not decoded yet.

        Args:
            known: all known tokens, prompt included.
        """
        undecoded: list[int] = known[self.prompt_len + self.output.decoded_count :].tolist()
        return undecoded

    def change_state(self, state: State) -> None:
        """Changes the state. Raises AssertionError for a transition that is not in the table, which
        is a bug in the scheduler.
        """
        if state not in _NEXT.get(self.state, ()):
            raise AssertionError(f"request {self.id}: {self.state.value} → {state.value}")
        self.state = state
        self.retractions += state is State.RETRACTED

    def append_forced_tokens(self, room: int, *, masked: bool) -> tuple[list[int], Finish | None]:
        """Appends the tokens that the grammar forces, at most `room`, like
        `OutputBuilder.append_grammar_forced`. Appends none if the request has a logit processor,
        which must see every token.
        """
        if self.processor is not None:
            return [], None
        tokens, finish = self.output.append_grammar_forced(room, masked=masked)
        if tokens:
            self.jumps.append((self.limit - self.prompt_len - room, len(tokens)))
        return tokens, finish

    def accept_checked_draft(
        self, start: int, tokens: Sequence[int], places: Sequence[int], matcher: Matcher
    ) -> bool:
        """Accepts several drawn tokens, and the tokens that the grammar forces after each of them.
        Returns False and accepts none if they have to be inspected one by one.

        Args:
            start: index of the first of them in the output.
            tokens: the tokens.
            places: for each drawn token, the index after it and the tokens forced after it.
            matcher: copy of the output's matcher that has accepted them.
        """
        own = self.output.matcher
        if own is None or self.times.deadline is not None or not own.adopt_copied_position(matcher):
            return False
        for first, end in pairwise((0, *places)):
            if (forced := end - first - 1) > 0:
                self.jumps.append((start + first + 1, forced))
                self.output.forced_tokens += forced
        return True

    def add_prompt_logprobs(self, first: int, logprobs: list[TokenLogprob]) -> None:
        """Adds the log-probabilities of prompt tokens from position `first` on, ignoring those
        added before a retraction.

        Raises:
            ModelError: a log-probability is NaN or missing.
        """
        assert self.score_from is not None
        for position, entry in enumerate(logprobs, first):
            if entry.logprob is None or math.isnan(entry.logprob):
                raise not_finite_error(position)
        scored_to = max(self.score_from, 1) + len(self.output.prompt_logprobs)
        self.output.prompt_logprobs += logprobs[scored_to - first :]

    def build_generation(self, finish: Finish) -> Generation:
        """Builds the result. Must be called only once, after the request has left its slot and
        `tokens` is complete.
        """
        output = tuple(
            self.tokens[self.prompt_len : self.prompt_len + self.params.max_tokens].tolist()
        )
        drawn_by = self.output.drawn_by
        prompt = self.tokens[:0]
        meta: dict[str, object] = {"num_retractions": self.retractions}
        if self.params.return_prompt_token_ids or drawn_by.older:
            meta["weight_version"] = drawn_by.weights.version
        if drawn_by.older:
            meta["older_weight_versions"] = drawn_by.older
        if self.params.return_prompt_token_ids:
            prompt = self.tokens[: self.prompt_len]
            prompt = prompt if self.media is None else self.media.restore_placeholders(prompt)
            if self.jumps:
                meta["forced_tokens"] = [[index, index + count] for index, count in self.jumps]
        return self.output.build_result(
            output,
            finish,
            self._build_usage(len(output)),
            meta,
            prompt=prompt,
            miss=self.cache.miss,
            jumps=self.jumps,
        )

    def build_aborted_result(self, known: int) -> Generation:
        """Builds the result of a request that is about to be aborted. It has no text, only the
        usage of the first `known` tokens.
        """
        return Generation(
            "", finish_reason="abort", usage=self._build_usage(max(known - self.prompt_len, 0))
        )

    def _build_usage(self, completion_tokens: int) -> Usage:
        now = time.perf_counter()
        cached = max(self.cache.tokens, 0)
        return Usage(
            prompt_tokens=self.prompt_len,
            cached_tokens=cached,
            completion_tokens=completion_tokens,
            forced_tokens=self.output.forced_tokens,
            queue_s=(self.times.started or now) - self.times.submitted,
            first_token_s=(self.times.first_token or now) - self.times.submitted,
            total_s=now - self.times.submitted,
            host_tokens=self.cache.host_tokens,
            disk_tokens=self.cache.disk_tokens,
            image_tokens=0
            if self.media is None
            else self.media.count_image_tokens_before(self.prompt_len),
            cached_image_tokens=0
            if self.media is None
            else self.media.count_image_tokens_before(cached),
        )


def not_finite_error(position: int) -> ModelError:
    """Returns the error for a request whose logits at a position are NaN or infinite."""
    return ModelError(
        f"the model's logits for position {position} are NaN or infinite.",
        hint="Its weights may be damaged; float16 overflows in some models: use bfloat16 or float32.",
    )
