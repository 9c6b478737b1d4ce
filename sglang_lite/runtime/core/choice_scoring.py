"""Scoring the choices of a `select`: each is a request that generates nothing and reports its tokens' probabilities."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from functools import partial

from sglang_lite.protocol import (
    ChoiceScore,
    Generation,
    ParameterError,
    SamplingParams,
    Selection,
    SglError,
    Span,
    Usage,
)
from sglang_lite.runtime.core.engine_parts import EngineParts
from sglang_lite.runtime.output_builder import Event
from sglang_lite.runtime.prospect import Prospect
from sglang_lite.runtime.request import Request
from sglang_lite.runtime.tokens.token_log import TokenLog

_SCORE = SamplingParams(max_tokens=0, return_logprob=True)


class ChoiceScoring:
    """Scoring of the choices of a selection.

    Prompt and choice are tokenised together, as text that follows text always is. Where that merges tokens across the
    boundary for one choice, or one is empty, scoring starts before the boundary for all of them: every score is over
    the same text.

    The choices are requests that share all but their last tokens. So the scheduler lets one of them compute what is
    not cached of the prompt, and then all others run in one step.

    Args:
        sink: called once.
    """

    def __init__(self, parts: EngineParts, sink: Callable[[Selection | SglError], None]) -> None:
        self._parts, self._sink = parts, sink
        self._choices: Sequence[str] = ()
        self._lock = threading.Lock()
        self._ended = False
        self._results: dict[int, Generation] = {}
        self._requests: list[Request] = []
        self._unconditional = False

    def start(
        self,
        log: TokenLog,
        choices: Sequence[str],
        *,
        unconditional: bool,
        namespace: str,
        special: bool,
        prospect: Prospect | None = None,
    ) -> None:
        """Submits the requests, unless it was aborted. May take long: not on the loop's thread.

        Args:
            unconditional: score the choices without the prompt, too.
            special: special tokens can be written out in a choice.
            prospect: of the branch of a program that the text before is of.

        Raises:
            ParameterError: the prompt is too long; or a choice is empty where nothing is before it, or where it is
                to be scored without the prompt.
        """
        self._choices = choices
        if unconditional and not all(choices):
            raise ParameterError(
                "choices", "an empty one has no likelihood without the prompt.", hint="Use another choices_method."
            )
        texts = [Span(choice, special=special) for choice in choices]
        rows = self._rows(log, texts)
        self._unconditional = unconditional
        if unconditional:
            rows += [(log.encode([text], alone=True), 1) for text in texts]
        builder = self._parts.builder
        params = builder.resolved(_SCORE)
        requests = [
            request
            for row, (ids, start) in enumerate(rows)
            for request in builder.build(
                ids, params, partial(self._row_done, row), namespace=namespace, score_from=start
            )
        ]
        for request in requests[: len(choices)]:  # those with the text before
            request.prospect = prospect
            request.priority = 0 if prospect is None else prospect.priority
        with self._lock:
            if self._ended:
                return
            self._requests = requests
        for request in requests:
            self._parts.loop.submit(request)

    def abort(self) -> None:
        """Ends it with RequestAbortedError, unless it has ended; without a word where it has not been started."""
        with self._lock:
            requests = self._requests
            self._ended = self._ended or not requests
        for request in requests:
            self._parts.loop.abort(request)

    def _rows(self, log: TokenLog, choices: Sequence[Span]) -> list[tuple[array[int], int]]:
        """For each choice the ids of prompt and choice, and from where on they are scored."""
        if not (log.fixed or log.open or all(choice.text for choice in choices)):
            raise ParameterError("choices", "an empty one needs text before it.", hint="Add text, or leave it out.")
        tail = log.encode(log.open) if log.open or not log.fixed else array("i")
        together = [log.encode([*log.open, choice]) for choice in choices]
        start = min(_common_length(tail, ids) for ids in together)
        start = len(log.fixed) + min(start, *(len(ids) - 1 for ids in together))
        if start == 0:  # nothing precedes the first token, so a document's start stands there
            before = array("i", [self._document_start()])
            return [(before + log.fixed + ids, 1) for ids in together]
        return [(log.fixed + ids, start) for ids in together]

    def _document_start(self) -> int:
        tokenizer = self._parts.tokenizer
        if tokenizer.bos_id is not None:
            return tokenizer.bos_id
        return min(tokenizer.eos_ids, default=0)

    def _row_done(self, row: int, event: Event) -> None:
        if isinstance(event, SglError):
            self._end(event)
        elif isinstance(event, Generation):
            self._results[row] = event
            if len(self._results) == len(self._requests):
                self._end(self._selection())

    def _end(self, outcome: Selection | SglError) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        if isinstance(outcome, SglError):
            self.abort()
        self._sink(outcome)

    def _selection(self) -> Selection:
        count = len(self._choices)
        scores = []
        for row, choice in enumerate(self._choices):
            entries = self._results[row].prompt_logprobs
            scores.append(
                ChoiceScore(
                    choice,
                    tuple(e.token_id for e in entries),
                    tuple(e.logprob for e in entries if e.logprob is not None),
                    self._alone(count + row) if self._unconditional else None,
                )
            )
        usages = [result.usage for result in self._results.values()]
        return Selection(
            tuple(scores),
            Usage(
                prompt_tokens=sum(u.prompt_tokens for u in usages),
                cached_tokens=sum(u.cached_tokens for u in usages),
                queue_s=min(u.queue_s for u in usages),
                first_token_s=max(u.total_s for u in usages),
                total_s=max(u.total_s for u in usages),
            ),
            meta=self._meta(),
        )

    def _meta(self) -> dict[str, object]:
        """Reason why tokens of the prompt were not cached, of the choice that had to compute most."""
        rows = range(len(self._choices))
        row = max(rows, key=lambda i: self._results[i].usage.prompt_tokens - self._results[i].usage.cached_tokens)
        miss = self._results[row].meta.get("cache_miss")
        if miss is None:
            return {}
        left = miss.get("left")
        return {"cache_miss": miss if left is None else {**miss, "left": max(left - len(self._choices[row]), 0)}}

    def _alone(self, row: int) -> tuple[float | None, ...]:
        """The log-probabilities of a choice without the prompt; nothing precedes its first token but a document's
        start, where the model has such a token."""
        found = tuple(e.logprob for e in self._results[row].prompt_logprobs)
        has_start = self._parts.tokenizer.bos_id == self._requests[row].tokens[0]
        return found if has_start else (None, *found)


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    length = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
    return min(len(a), len(b)) if length is None else length
