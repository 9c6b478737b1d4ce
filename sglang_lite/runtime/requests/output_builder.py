"""Builds the output of one request: decodes tokens, applies grammar and stop strings, sends deltas
and the result.

Independent of slots, pages and steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_lite.protocol import (
    ConstraintError,
    Delta,
    Generation,
    ParameterError,
    SglError,
    TokenArray,
    TokenLogprob,
    TokenScores,
    Usage,
)
from sglang_lite.runtime.kv_cache.cache_miss import Miss
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.cut_text import CutText, count_tokens_of_prefix
from sglang_lite.runtime.requests.resolved_params import ResolvedParams
from sglang_lite.runtime.requests.result_fields import (
    add_token_texts,
    append_closing_brackets,
    build_token_scores,
    forced_text_spans,
    miss_fields,
)
from sglang_lite.runtime.structured_output.base import Matcher, TextSoFar
from sglang_lite.runtime.structured_output.request_matcher import RequestMatcher
from sglang_lite.runtime.structured_output.thinking import ThoughtLimiter
from sglang_lite.runtime.tokens.detokenize import IncrementalDecoder
from sglang_lite.runtime.tokens.token_log import spans_for_next_prompt
from sglang_lite.runtime.tokens.tokenizer import Tokenizer
from sglang_lite.text.stop import StopMatcher

logger = logging.getLogger("sglang_lite")

Event: TypeAlias = Delta | Generation | SglError
Sink: TypeAlias = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a generation ended, and the stop string or token that matched, if any. The values are
    those of `Generation`.
    """

    reason: Literal["stop", "length", "abort"]
    matched: str | int | None


@dataclass(frozen=True, slots=True)
class _EndedText:
    """Text of an output that has ended.

    Attributes:
        kept: text that was drawn.
        brackets: text after it that closes a value cut by a limit.
        left_out: JSON Pointers of missing values; "" is the whole value.
        ids: tokens whose text begins with the kept text, or equals it.
        scored: tokens whose scores are reported.
    """

    kept: str
    brackets: str
    left_out: list[str]
    ids: tuple[int, ...]
    scored: tuple[int, ...]


@dataclass(slots=True)
class LoadedWeights:
    """Weights that an engine runs. Their version has a name, which `update_weights` changes."""

    version: str = "default"


@dataclass(slots=True)
class DrawnBy:
    """Weights that drew the tokens of an output: the current weights, and older ones that were
    replaced meanwhile.

    Attributes:
        weights: those that draw now.
        older: replaced weights that drew its first tokens, as (number of tokens when they were
            replaced, version).
    """

    weights: LoadedWeights
    older: list[tuple[int, str]] = field(default_factory=list)

    def record_weight_replacement(self, drawn: int) -> None:
        """Records that the weights are about to be replaced, after `drawn` tokens in all."""
        if drawn > (self.older[-1][0] if self.older else 0):
            self.older.append((drawn, self.weights.version))


@dataclass(slots=True)
class DraftProgress:
    """Statistics of a request's drafts, and what drafters know about the request.

    Attributes:
        steps: number of steps that checked drafts.
        drafted: number of drafted tokens that no grammar forced.
        accepted: number of draws after drafts that counted, each of which has saved a step.
        learned: number of the request's tokens that drafters have seen.
        kinds: kind of its text, by drafter.
        hoped, right: decayed numbers of expected and actual right guesses.
        misses: number of recent steps in a row without a right guess.
        rest: number of steps until the next draft.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    learned: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    hoped: float = 0.0
    right: float = 0.0
    misses: int = 0
    rest: int = 0


def _ignore_late_event(event: Event) -> None:
    """Ignores an event. Takes the place of a sink that has received its last event."""


class OutputBuilder:
    """Assembles one request's output.

    Args:
        request_id: id of the request, for log messages.
        tokenizer: tokenizer of the model.
        params: resolved sampling parameters.
        ends: ids of the tokens that end the output.
        sink: callback that receives the events, on the loop's thread; the last event is a
            Generation or an SglError.
        stream: whether to send deltas.
        drawn_by: weights that draw the tokens.

    Attributes:
        drawn_by: the same.
        matcher: matcher of the request's grammar, or None without a grammar.
        cut: closes its text if a limit cuts it; None without a grammar.
        thoughts: limiter of its thoughts; None if these have no limits.
        text_of: function that returns the text of tokens, without that of special ones.
        tokens_of: function that returns the tokenizer's tokens of a text within another one.
        prompt_logprobs: log-probabilities of the prompt's tokens computed so far.
        recorded: arrays for the result, by field, read before the request's pages are released.
        forced_tokens: number of tokens appended because the grammar forces them, without a step
            each.
        decoded_count: number of tokens whose text was processed.
        replayed_count: number of the output's first ids given by the caller, to continue an earlier
            stream.
        healed: value of `get_meta_info(name)["healed"]`; None if the prompt was not healed.
        origin: what requested the output, such as a node of a program; outputs of the same origin
            are alike.
        draft: progress of its drafts.
    """

    thoughts: ThoughtLimiter | None = None

    def __init__(
        self,
        request_id: int,
        tokenizer: Tokenizer,
        params: ResolvedParams,
        ends: frozenset[int],
        sink: Sink,
        *,
        stream: bool,
        drawn_by: DrawnBy,
    ) -> None:
        self.params = params
        self.ends = ends
        self.sink = sink
        self.stream = stream
        self.drawn_by = drawn_by
        self.matcher: RequestMatcher | None = None
        self.cut: CutText | None = None
        self.text_of: Callable[[Sequence[int]], bytes] = tokenizer.decode_bytes
        self.tokens_of: Callable[[str], list[int]] = partial(tokenizer.encode, first=False)
        self.prompt_logprobs: list[TokenLogprob] = []
        self.recorded: Mapping[str, TokenArray] = {}
        self.forced_tokens = 0
        self.decoded_count = 0
        self.replayed_count = 0
        self.healed: Mapping[str, object] | None = None
        self.origin: Hashable = None
        self.draft = DraftProgress()
        self._replaying = False
        self._request_id = request_id
        self._tokenizer = tokenizer
        self._given = b""  # text before the first token
        self._decoder = self._new_decoder()
        self._stops = StopMatcher(params.stop, params.stop_regex)
        self._text: list[str] = []
        self._sent_chars = 0  # number of its characters that were sent
        self._logprobs: list[TokenLogprob] = []
        self._scores: list[tuple[float, float]] = []
        self._unsent: list[int] = []
        self._sent = 0
        # slow for a new byte, then cached: done here, off the loop's thread
        for byte in _last_stop_bytes(params):
            tokenizer.tokens_containing(byte)

    def send(self, event: Event) -> None:
        """Passes an event to the sink. Logs an exception of the sink, so that other requests
        continue.
        """
        sink = self.sink
        if not isinstance(event, Delta):
            # The last event. A sink often holds the request, and a cycle would keep both until the
            # collector runs.
            self.sink = _ignore_late_event
        try:
            sink(event)
        except Exception:  # raised by the caller's code
            logger.exception("the sink of request %d failed", self._request_id)

    # --------------------------------------------------------------------------------------- tokens

    def process_tokens(self, tokens: Sequence[int], logprob: TokenLogprob | None) -> Finish | None:
        """Processes the next tokens: advances the grammar, decodes them, looks for stops, and sends
        a delta if streaming. Only the last token may end the output.

        Returns:
            Reason for the end, or None if the output continues.

        Raises:
            ConstraintError: the grammar does not allow the token.
            ParameterError: a stop pattern takes too long to match.
        """
        token = tokens[-1]
        if logprob is not None:
            self._logprobs.append(self._add_text_if_requested(logprob))
        if self.params.scores_next_token:
            return Finish("length", None)
        ends = self._ends_output(token)
        complete = self.matcher is not None and _accept_tokens(self.matcher, (token,))
        if ends:
            return Finish("stop", token)
        text = self._matcher_text_if_open
        piece = self._decoder.push(tokens) if text is None else self._take_new_text(text)
        stops = self._stops
        early = self.decoded_count < self.params.min_tokens
        certain = stops.append_unmatched(piece) if early else stops.push(piece)
        self.decoded_count += len(tokens)
        self._unsent += tokens
        self._add_confirmed_text(certain)
        if self._stops.matched is not None:
            return Finish("stop", self._stops.matched)
        return Finish("stop", None) if complete else None

    def record_score(self, logprob: float, allowed: float) -> None:
        """Records the log-probabilities of the next token, and of all tokens that the grammar
        allows there, as in `TokenScores`. Must be called before the token is processed.
        """
        self._scores.append((logprob, allowed))

    def advance_grammar(self, token: int) -> Finish | None:
        """Processes the next token like `process_tokens`, but only advances the grammar, because
        its text is not needed yet.
        """
        assert self.matcher is not None
        ends = self._ends_output(token)
        complete = _accept_tokens(self.matcher, (token,))
        if ends:
            return Finish("stop", token)
        return Finish("stop", None) if complete else None

    def append_grammar_forced(self, limit: int, *, masked: bool) -> tuple[list[int], Finish | None]:
        """Appends the tokens that the grammar forces next, at most `limit`. A single token is not
        appended, because it takes a step anyway.

        Args:
            limit: maximum number of tokens.
            masked: whether to process them like `advance_grammar`.

        Returns:
            The tokens appended, and the reason for the end if the last one ends the output.

        Raises:
            ConstraintError, ParameterError: like `process_tokens`.
        """
        return self._process_forced_tokens(self._forced_tokens_within(limit), masked=masked)

    def _forced_tokens_within(self, limit: int) -> list[int]:
        if self.matcher is None or self.params.scores_tokens:
            return []
        try:
            forced = self.matcher.find_forced_tokens()[: max(limit, 0)]
        except Exception as error:  # raised by the grammar engine's library
            raise grammar_engine_error(self.matcher, error) from error
        return forced if len(forced) > 1 else []

    def _process_forced_tokens(
        self, forced: list[int], *, masked: bool
    ) -> tuple[list[int], Finish | None]:
        finish: Finish | None = None
        if masked and forced and self.matcher is not None and self.ends.isdisjoint(forced):
            self.forced_tokens += len(forced)
            return forced, Finish("stop", None) if _accept_tokens(self.matcher, forced) else None
        for count, token in enumerate(forced, 1):
            finish = self.advance_grammar(token) if masked else self.process_tokens((token,), None)
            if finish is not None:
                forced = forced[:count]
                break
        self.forced_tokens += len(forced)
        return forced, finish

    # ----------------------------------------------------------------------------------- continuing

    def rebuild_with_replay(
        self,
        ids: Sequence[int],
        limit: int,
        matcher: RequestMatcher | None,
        *,
        jump: bool,
        masked: bool,
    ) -> tuple[OutputBuilder, list[int], Finish | None]:
        """Creates another builder and replays the ids with which the output begins. The new builder
        then has the state that this one would have after these ids.

        Can be called on any thread. Forced tokens are appended as jumps at the same places as in
        the earlier stream, so the rest of the output is also the same.

        Args:
            ids: ids that the output begins with.
            limit: maximum number of tokens of the output.
            matcher: matcher at the beginning of the grammar, or None without a grammar.
            jump: whether forced tokens are appended as a whole.
            masked: whether to process tokens like `advance_grammar`.

        Returns:
            The builder, the remaining tokens of a jump that the ids end within, and the reason for
            the end if the output is complete.

        Raises:
            ParameterError: the grammar does not allow an id, or the output ends before the last id.
        """
        output = OutputBuilder(
            self._request_id,
            self._tokenizer,
            self.params,
            self.ends,
            self.sink,
            stream=self.stream,
            drawn_by=self.drawn_by,
        )
        output.cut = self.cut
        forced, finish = output.replay_ids(ids, limit, matcher, jump=jump, masked=masked)
        return output, forced, finish

    def replay_ids(
        self,
        ids: Sequence[int],
        limit: int,
        matcher: RequestMatcher | None,
        *,
        jump: bool,
        masked: bool,
    ) -> tuple[list[int], Finish | None]:
        """Processes the ids with which the output begins, without sending deltas. Must be called
        before any other token is processed. Arguments, results and errors are those of
        `rebuild_with_replay`, except that no builder is returned.
        """
        self.matcher = matcher
        self.replayed_count = len(ids)
        self._replaying = True
        index = 0
        while True:
            forced, finish = (
                self._replay_jump(ids, index, limit, masked=masked) if jump else ([], None)
            )
            index += len(forced)
            if index >= len(ids) or finish is not None:
                break
            try:
                finish = (
                    self.advance_grammar(ids[index])
                    if masked
                    else self.process_tokens((ids[index],), None)
                )
            except ConstraintError as error:
                raise ParameterError(
                    "output_ids",
                    f"{ids[index]} at index {index} can't be: {error}",
                    hint="Give the ids of one output.",
                ) from error
            index += 1
            if finish is not None:
                break
        if index < len(ids):
            assert finish is not None
            by = "its grammar" if finish.matched is None else repr(finish.matched)
            raise ParameterError(
                "output_ids",
                f"the output ends with index {index - 1} (by {by}), and {len(ids) - index:,} ids follow.",
            )
        self._replaying = False
        return forced[len(forced) - (index - len(ids)) :], finish

    def _replay_jump(
        self, ids: Sequence[int], index: int, limit: int, *, masked: bool
    ) -> tuple[list[int], Finish | None]:
        """Appends the tokens that the grammar forces after the first `index` ids, as
        `append_grammar_forced` does. Appends nothing if the given ids continue differently.
        """
        forced = self._forced_tokens_within(limit - index)
        known = ids[index : index + len(forced)]
        return (
            self._process_forced_tokens(forced, masked=masked)
            if forced[: len(known)] == list(known)
            else ([], None)
        )

    def begin_with_text(self, text: bytes) -> None:
        """Begins the output with a text that the prompt's last token spells. Must be called before
        any other method, and `read_given_text` before submission.
        """
        self._given = text
        self._decoder = self._new_decoder()

    @property
    def begins_with_text(self) -> bool:
        """Whether the output begins with a text that the prompt's last token spells."""
        return bool(self._given)

    def read_given_text(self, matcher: RequestMatcher | None) -> Finish | None:
        """Processes the text that the output begins with, without sending it. Can be slow.

        Args:
            matcher: matcher at the beginning of the grammar, or None without a grammar.

        Returns:
            Reason for the end if the output is complete, or None.

        Raises:
            ConstraintError: the grammar does not allow the text.
            ParameterError: a stop pattern takes too long to match.
        """
        self.matcher = matcher
        if matcher is not None and not matcher.accept_text(self._given):
            raise ConstraintError(f"the constraint does not allow {self._given!r}: {matcher.error}")
        early = self.params.min_tokens > 0
        piece = self._decoder.push(())
        certain = self._stops.append_unmatched(piece) if early else self._stops.push(piece)
        if certain:
            self._text.append(certain)
        if self._stops.matched is not None:
            return Finish("stop", self._stops.matched)
        return Finish("stop", None) if matcher is not None and matcher.finished else None

    def send_known_text(self) -> None:
        """Sends the text that is known before the first draw as the first delta, if the request is
        streamed. This is the text of the given ids, because a continued stream repeats the whole
        text, or else the given text.
        """
        if self.stream and self._text:
            self._send_confirmed_text("".join(self._text))

    def build_stop_string_mask(self) -> NDArray[np.bool_]:
        """Returns a mask of the tokens that can complete a stop string, bool [vocab_size]: those
        containing its last byte.
        """
        masks = list(map(self._tokenizer.tokens_containing, _last_stop_bytes(self.params)))
        tokens: NDArray[np.bool_] = np.logical_or.reduce(masks)
        return tokens

    def _ends_output(self, token: int) -> bool:
        """Returns whether a token ends the output. Until the grammar is complete, an
        end-of-sequence token ends it only if `stop_token_ids` has the token.
        """
        if token not in self.ends:
            return False
        return self.matcher is None or token in self.params.stop_token_ids or self.matcher.complete

    @property
    def _matcher_text_if_open(self) -> TextSoFar | None:
        """Text of the output, if a token outside the text may end it. Otherwise None."""
        return None if self.matcher is None else self.matcher.open_text

    # -------------------------------------------------------------------------------------- results

    def build_result(
        self,
        output: tuple[int, ...],
        finish: Finish,
        usage: Usage,
        meta: dict[str, object],
        *,
        prompt: Ints,
        miss: Miss | None,
        jumps: Sequence[tuple[int, int]],
    ) -> Generation:
        """Builds the result. Must be called only once.

        Args:
            output: all token ids of the output.
            finish: reason for the end.
            usage: token counts and times of the request.
            meta: metadata of the request, to which the output's are added.
            prompt: ids of the prompt, if the result has them, int32.
            miss: reason why tokens of the prompt were not cached.
            jumps: jumps of the grammar, as (index in the output, number of tokens).
        """
        params = self.params
        result = self._end_text(output, finish)
        if self.matcher is not None and (thinking := self.matcher.thinking) is not None:
            meta["thinking"] = thinking
        if self.matcher is not None and self.matcher.engine.name:  # empty for free text
            meta["constraint_backend"] = self.matcher.engine.name
            meta["shortened"] = result.left_out
            if self.cut is not None and self.cut.fewest_tokens is not None:
                meta["fewest_tokens"] = self.cut.fewest_tokens
            if (guard := self.matcher.repeats) is not None:
                meta["repeats"] = {"refused": guard.refused, "repeated": guard.repeated}
        if (draft := self.draft).steps:
            meta |= {"spec_verify_ct": draft.steps, "spec_draft_token_num": draft.drafted}
            meta |= {
                "spec_accept_token_num": draft.accepted,
                "spec_accept_length": 1 + draft.accepted / draft.steps,
            }
            meta["spec_accept_rate"] = draft.accepted / draft.drafted
        if self.replayed_count:
            meta["continued_from"] = self.replayed_count
        if self.healed is not None:
            meta["healed"] = self.healed
        if miss is not None:
            meta["cache_miss"] = miss_fields(miss, self._tokenizer)
        if jumps:
            decoder = self._new_decoder()
            meta["forced_text"] = forced_text_spans(decoder, result.ids, jumps, len(result.kept))
        return Generation(
            text=result.kept + result.brackets,
            token_ids=output,
            prompt_ids=tuple(prompt.tolist()),
            spans=append_closing_brackets(
                spans_for_next_prompt(
                    self._tokenizer,
                    result.ids,
                    result.kept,
                    skip_special=params.skip_special_tokens,
                    before=self._given,
                ),
                result.brackets,
            ),
            finish_reason=finish.reason,
            matched=finish.matched,
            usage=usage,
            output_logprobs=tuple(self._logprobs),
            prompt_logprobs=tuple(map(self._add_text_if_requested, self.prompt_logprobs)),
            meta=meta,
            scores=self._token_scores(result),
            routed_experts=self.recorded.get("routed_experts"),
            hidden_states=self.recorded.get("hidden_states"),
        )

    def _end_text(self, output: tuple[int, ...], finish: Finish) -> _EndedText:
        """Ends the text, and sends the rest of it if streaming."""
        params = self.params
        open_text = None if self.params.scores_next_token else self._matcher_text_if_open
        ids = output
        # a stop token, kept if `include_stop` is set and it has text
        if isinstance(finish.matched, int):
            stop = self._tokenizer.decode(output[-1:], skip_special=params.skip_special_tokens)
            ids = output if stop and params.include_stop else output[:-1]
        if open_text is not None:
            open_text.close(len(ids))
            ids = output[: open_text.tokens]
            self._drop_logprobs(len(ids))
            rest = self._take_new_text(open_text)
        else:
            # an incomplete character at the end is left out
            rest = self._decoder.push(ids[self.decoded_count :])
        if self._stops.matched is None:
            self._text.append(self._stops.flush() + rest)
        elif params.include_stop:
            self._text.append(self._stops.matched_text)
        kept = "".join(self._text)
        brackets = ""
        left_out = []
        scored = ids if open_text is not None else output
        if finish.reason == "length" and self.cut is not None and not params.scores_next_token:
            closed = self.cut.close(kept, self._sent_chars, ids, self._new_decoder())
            if closed is None:
                assert self.matcher is not None
                left_out = [] if self.cut.is_free and self.matcher.complete else [""]
            else:
                left_out = [closed.left_out]
                kept = kept[: closed.kept]
                brackets = closed.brackets
                scored = ids[: count_tokens_of_prefix(self._new_decoder(), ids, len(kept))]
                self._drop_logprobs(len(scored))
        if self.stream:
            self._send_up_to(kept + brackets, len(kept) + len(brackets))
        return _EndedText(kept, brackets, left_out, ids, scored)

    def _drop_logprobs(self, count: int) -> None:
        """Drops the log-probabilities after the first `count` tokens."""
        del self._logprobs[max(count - self.replayed_count, 0) :]

    def would_close_if_truncated(self, ids: Sequence[int]) -> bool:
        """Returns whether the output could be closed into a complete value if it were cut now.

        Args:
            ids: its tokens so far.
        """
        if self.cut is None:
            return False
        decoder = self._new_decoder()
        return (
            self.cut.close(decoder.push(ids), self._sent_chars, ids, self._new_decoder())
            is not None
        )

    def _new_decoder(self) -> IncrementalDecoder:
        return IncrementalDecoder(
            self._tokenizer, skip_special=self.params.skip_special_tokens, before=self._given
        )

    def _take_new_text(self, text: TextSoFar) -> str:
        """Returns the new part of a matcher's text, which does not include the given text."""
        return self._decoder.take_new_text(self._given.decode() + text.certain_text)

    def _token_scores(self, result: _EndedText) -> TokenScores | None:
        """Returns the scores of the tokens of a text that has ended; None if none were recorded."""
        if not self._scores or not result.scored:
            return None
        given: list[tuple[float | None, float | None]] = [(None, None)] * self.replayed_count
        scores = [*given, *self._scores][: len(result.scored)]
        return build_token_scores(self._new_decoder(), result.scored, scores, len(result.kept))

    def _add_text_if_requested(self, logprob: TokenLogprob) -> TokenLogprob:
        return (
            add_token_texts(logprob, self._tokenizer)
            if self.params.return_text_in_logprobs
            else logprob
        )

    def _add_confirmed_text(self, text: str) -> None:
        """Adds text to the result once it can no longer become part of a stop string. Sends it if
        streaming.
        """
        if not text:
            return
        self._text.append(text)
        if self.stream and not self._replaying:
            self._send_confirmed_text(text)

    def _send_confirmed_text(self, new: str) -> None:
        """Sends the text that remains even if a limit cuts the output.

        Args:
            new: text that was added.
        """
        if self.cut is None:
            self._send_delta(new)
            return
        whole = "".join(self._text)
        self._send_up_to(whole, self.cut.count_sendable_characters(whole, self.decoded_count))

    def _send_up_to(self, text: str, count: int) -> None:
        """Sends the first `count` characters of the result, except those already sent."""
        if count > self._sent_chars:
            self._send_delta(text[self._sent_chars : count])

    def _send_delta(self, text: str) -> None:
        self._sent_chars += len(text)
        open_text = self._matcher_text_if_open
        count = len(self._unsent) if open_text is None else open_text.tokens - self._sent
        ids = tuple(self._unsent[:count])
        self._unsent = self._unsent[count:]
        known = self._sent
        self._sent = self._sent + len(ids)
        # Replayed ids have no log-probabilities.
        first = max(known - self.replayed_count, 0)
        end = max(self._sent - self.replayed_count, 0)
        self.send(Delta(text, ids, tuple(self._logprobs[first:end])))


def _last_stop_bytes(params: ResolvedParams) -> list[int]:
    """Returns the last byte of each stop string."""
    return [stop.encode("utf-8", "surrogatepass")[-1] for stop in params.stop]


def _accept_tokens(matcher: Matcher, tokens: Sequence[int]) -> bool:
    """Advances the matcher by tokens. Returns whether the grammar then allows nothing but the end."""
    try:
        if matcher.accept_all(tokens) if len(tokens) > 1 else matcher.accept(tokens[0]):
            return matcher.finished
    except Exception as error:  # raised by the grammar engine's library; must not end the loop
        raise grammar_engine_error(matcher, error) from error
    raise ConstraintError(f"the constraint allows no continuation: {matcher.error}")


def grammar_engine_error(matcher: Matcher, error: Exception) -> ConstraintError:
    """Returns the error for an exception raised by a grammar engine's library."""
    return ConstraintError(
        f"{matcher.engine.name} failed: {error!r}",
        hint="Choose another one with constraint_backend.",
    )
