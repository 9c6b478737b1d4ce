"""Scoring the choices of a `select`: each is a request that generates nothing and reports its tokens' probabilities."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sglang_lite.protocol import ChoiceScore, Generation, SamplingParams, Selection, SglError, Span, Usage
from sglang_lite.runtime.request import Event
from sglang_lite.runtime.tokens.token_log import tokenise

if TYPE_CHECKING:
    from sglang_lite.runtime.engine import Engine

_SCORE = SamplingParams(max_tokens=0, return_logprob=True)
_PREFILL = SamplingParams(max_tokens=0)


class Selecting:
    """One selection under way.

    Prompt and choice are tokenised together, as text that follows text always is. Where that merges tokens across the
    boundary for one choice, scoring starts before the boundary for all of them: every score is over the same text.

    The shared prefix is computed first; then all choices run in one step, reading it from the cache.
    """

    def __init__(self, engine: Engine, choices: tuple[str, ...], sink: Callable[[Selection | SglError], None]) -> None:
        self._engine, self._choices, self._sink = engine, choices, sink
        self._lock = threading.Lock()
        self._ended = False
        self._results: dict[int, Generation] = {}
        self._rows: list[tuple[list[int], int]] = []  # ids and where scoring starts; unconditional ones second
        self._prefix_usage = Usage()

    def start(self, spans: Sequence[Span], *, unconditional: bool, namespace: str) -> None:
        tokenizer = self._engine.tokenizer
        prompt = tokenise(tokenizer, spans)
        together = [tokenise(tokenizer, [*spans, Span(choice)]) for choice in self._choices]
        start = min(_common_length(prompt, ids) for ids in together)
        start = min(start, *(len(ids) - 1 for ids in together))
        if start == 0:  # nothing precedes the first token, so a document's start stands there
            before = self._document_start()
            self._rows = [([before, *ids], 1) for ids in together]
        else:
            self._rows = [(ids, start) for ids in together]
        if unconditional:
            alone = [tokenise(tokenizer, [Span(choice)]) for choice in self._choices]
            self._rows += [(ids, 1) for ids in alone]
        prefix = self._rows[0][0][: max(start, 1)]
        # The whole prefix is computed by one request, and found by the others.
        self._submit(prefix, _PREFILL, lambda event: self._prefix_done(event, namespace), namespace)

    def _document_start(self) -> int:
        tokenizer = self._engine.tokenizer
        if tokenizer.bos_id is not None:
            return tokenizer.bos_id
        return min(tokenizer.eos_ids, default=0)

    def _submit(
        self,
        ids: list[int],
        params: SamplingParams,
        sink: Callable[[Event], None],
        namespace: str,
        start: int = -1,
    ) -> None:
        request = self._engine._request(
            ids, params, sink, namespace=namespace, score_from=start if start >= 0 else None
        )
        self._engine._submit(request)

    def _prefix_done(self, event: Event, namespace: str) -> None:
        if isinstance(event, SglError):
            self._end(event)
        elif isinstance(event, Generation):
            self._prefix_usage = event.usage
            try:
                for row, (ids, start) in enumerate(self._rows):
                    self._submit(ids, _SCORE, lambda e, row=row: self._row_done(row, e), namespace, start)  # type: ignore[misc] # mypy can't infer a lambda's default
            except SglError as error:
                self._end(error)

    def _row_done(self, row: int, event: Event) -> None:
        if isinstance(event, SglError):
            self._end(event)
        elif isinstance(event, Generation):
            self._results[row] = event
            if len(self._results) == len(self._rows):
                self._end(self._selection())

    def _end(self, outcome: Selection | SglError) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._sink(outcome)

    def _selection(self) -> Selection:
        scores = []
        count = len(self._choices)
        for row, choice in enumerate(self._choices):
            entries = self._results[row].prompt_logprobs
            unconditional: tuple[float | None, ...] | None = None
            if len(self._rows) > count:
                ids, _ = self._rows[count + row]
                found = [e.logprob for e in self._results[count + row].prompt_logprobs]
                skipped = 1 if self._engine.tokenizer.bos_id == ids[0] else 0
                unconditional = tuple(found) if skipped else (None, *found)
            scores.append(
                ChoiceScore(
                    choice,
                    tuple(e.token_id for e in entries),
                    tuple(e.logprob for e in entries if e.logprob is not None),
                    unconditional,
                )
            )
        results = list(self._results.values())
        usage = Usage(
            prompt_tokens=sum(r.usage.prompt_tokens for r in results),
            cached_tokens=sum(r.usage.cached_tokens for r in results),
            queue_s=self._prefix_usage.queue_s,
            first_token_s=max(r.usage.total_s for r in results) + self._prefix_usage.total_s,
            total_s=max(r.usage.total_s for r in results) + self._prefix_usage.total_s,
        )
        return Selection(tuple(scores), usage)


def _common_length(a: Sequence[int], b: Sequence[int]) -> int:
    length = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), None)
    return min(len(a), len(b)) if length is None else length
