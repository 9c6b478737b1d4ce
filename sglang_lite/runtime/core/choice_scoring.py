"""Scoring of a `select`'s choices: one request per choice, which generates nothing and reports log-probabilities."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from sglang_lite.program.prefixes import common_length
from sglang_lite.protocol import (
    UNSET,
    ChoiceScore,
    Generation,
    ParameterError,
    RequestAbortedError,
    SamplingParams,
    Selection,
    SglError,
    Span,
    Unset,
    Usage,
)
from sglang_lite.runtime.core.engine_context import EngineContext
from sglang_lite.runtime.requests.output_builder import Event
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.requests.scheduled_branch import ScheduledBranch
from sglang_lite.runtime.tokens.image_span import MediaItem
from sglang_lite.runtime.tokens.token_log import TokenLog

_SCORE = SamplingParams(max_tokens=0, return_logprob=True)


class ChoiceScoring:
    """Scoring of the choices of a selection.

    Prompt and choice are tokenised together, like any text that follows text. If this merges tokens across the boundary
    for one choice, or a choice is empty, scoring starts before the boundary for all choices, so that every score covers
    the same text.

    The choices' requests share all but their last tokens, and run in one step. If much of the prompt is not cached, a
    request for the prompt alone runs before them, and also reports the log-probabilities of their first tokens: then
    the choices compute neither the prompt nor its last token, and a choice of one token computes nothing. A choice that
    invokes a late adapter at another place has keys and values of its own before it: then all choices compute theirs.

    Args:
        context: context of the engine.
        sink: callback for the scores or the error; called once.
    """

    def __init__(self, context: EngineContext, sink: Callable[[Selection | SglError], None]) -> None:
        self._context, self._sink = context, sink
        self._choices: Sequence[str] = ()
        self._start = 0  # index of the first scored token in the choices' rows
        self._lock = threading.Lock()
        self._ended = False
        self._requests: list[Request] = []  # one per row: choices, then choices without the prompt
        self._prompt_request: Request | None = None  # for the prompt alone
        self._results: dict[int, Generation] = {}
        # used on the loop's thread only
        self._awaited: set[int] = set()  # rows without a result yet
        self._prompt: Generation | None = None  # result of `_before`, if it was submitted

    def start(
        self,
        log: TokenLog,
        choices: Sequence[str],
        *,
        unconditional: bool,
        namespace: str,
        special: bool,
        lora_path: tuple[str, ...] | Unset = UNSET,
        branch: ScheduledBranch | None = None,
    ) -> None:
        """Submits the requests, unless aborted. May take long, so not on the loop's thread.

        Args:
            log: prompt before the choices.
            choices: texts to score.
            unconditional: whether to also score the choices without the prompt.
            namespace: namespace in the radix tree.
            special: whether the choices can name special tokens.
            lora_path: adapter that scores, as in SamplingParams.
            branch: program's branch, if any.

        Raises:
            ParameterError: the prompt is too long, the adapter is not there, or a choice is empty, or has no tokens,
                although it follows no text or is to be scored without the prompt.
        """
        self._choices = choices
        if unconditional and not all(choices):
            raise ParameterError(
                "choices", "an empty one can't be scored without the prompt.", hint="Use another choices_method."
            )
        texts = [Span(choice, special=special) for choice in choices]
        rows = self._rows(log, texts)
        self._start = rows[0][1]
        before = self._make_prompt_request([ids for ids, _ in rows], namespace, log.media, lora_path)
        if unconditional:
            rows += [(log.encode([text], alone=True), 1) for text in texts]
        builder = self._context.builder
        params = builder.resolved(msgspec.structs.replace(_SCORE, lora_path=lora_path))
        requests = [
            request
            for row, (ids, start) in enumerate(rows)
            for request in builder.build(
                ids,
                params,
                partial(self._row_done, row),
                namespace=namespace,
                score_from=start,
                media=log.media if row < len(choices) else (),
            )
        ]
        for request in (before, *requests[: len(choices)]):  # the rows that contain the prompt
            request.branch = branch
            request.priority = 0 if branch is None else branch.program.priority
        with self._lock:
            if self._ended:
                return
            self._requests, self._prompt_request = requests, before
        self._context.loop.inbox.post(self._begin)

    def abort(self) -> None:
        """Ends the scoring with RequestAbortedError, unless it has ended. Sends no event if it has not been started."""
        with self._lock:
            requests = self._requests if self._prompt_request is None else [self._prompt_request, *self._requests]
            self._ended = self._ended or not requests
        for request in requests:
            self._context.loop.abort(request)

    def partial(self) -> Generation | None:
        """Result of an abort, which has used the prompts of all rows, as the scores would have; None if nothing was
        submitted."""
        if not self._requests or self._ended:
            return None
        used = Usage(prompt_tokens=sum(request.prompt_len for request in self._requests))
        return Generation("", finish_reason="abort", usage=used)

    def _make_prompt_request(
        self,
        rows: Sequence[Sequence[int]],
        namespace: str,
        media: Sequence[MediaItem],
        lora_path: tuple[str, ...] | Unset,
    ) -> Request:
        """Request for the text before the choices, which asks for the log-probabilities of the choices' first
        tokens."""
        firsts = tuple({ids[self._start] for ids in rows})
        asked = SamplingParams(
            max_tokens=0, temperature=0, return_logprob=True, token_ids_logprob=firsts, lora_path=lora_path
        )
        builder = self._context.builder
        ids = rows[0][: self._start]
        (request,) = builder.build(ids, builder.resolved(asked), self._prompt_done, namespace=namespace, media=media)
        return request

    def _begin(self) -> None:
        """Submits the request for the prompt first if that saves time, else all choices at once. On the loop's
        thread."""
        loop, before, count = self._context.loop, self._prompt_request, len(self._choices)
        assert before is not None
        store = loop.scheduler.store
        cached = store.tree.cached_length(*before.space.key(before.tokens))
        again = max(len(before.tokens) // store.page_size * store.page_size - cached, 1)  # for each choice
        submitted = self._requests
        self._awaited = set(range(len(submitted)))
        alike = all(each.space.common(before.space, self._start) == self._start for each in self._requests[:count])
        if alike and again * (count - 1) >= self._context.step_cost:
            for row, request in enumerate(self._requests[:count]):
                request.score_from = self._start + 1
                if len(request.tokens) == self._start + 1:  # no token is left to compute
                    self._awaited.remove(row)
            submitted = [before, *self._requests[count:]]
        for request in submitted:
            loop.receive(request)

    def _rows(self, log: TokenLog, choices: Sequence[Span]) -> list[tuple[array[int], int]]:
        """Token ids of prompt and choice, and the index of the first scored token, for each choice."""
        if not (log.fixed or log.open or all(choice.text for choice in choices)):
            raise ParameterError("choices", "an empty one needs text before it.", hint="Add text, or leave it out.")
        tail = log.encode(log.open) if log.open or not log.fixed else array("i")
        together = [log.encode([*log.open, choice]) for choice in choices]
        start = min(common_length(tail, ids) for ids in together)
        start = len(log.fixed) + min(start, *(len(ids) - 1 for ids in together))
        if start < 0:
            unknown = next(choice.text for choice, ids in zip(choices, together) if not ids)
            raise ParameterError("choices", f"{unknown!r:.60} has no tokens for this model.", hint="Leave it out.")
        if start == 0:  # nothing precedes the first token, so the start of a document is put there
            before = array("i", [self._document_start()])
            return [(before + log.fixed + ids, 1) for ids in together]
        return [(log.fixed + ids, start) for ids in together]

    def _document_start(self) -> int:
        tokenizer = self._context.tokenizer
        if tokenizer.bos_id is not None:
            return tokenizer.bos_id
        return min(tokenizer.eos_ids, default=0)

    def _prompt_done(self, event: Event) -> None:
        if isinstance(event, SglError):
            self._end(event)
        elif isinstance(event, Generation):
            self._prompt = event
            for row in sorted(self._awaited):
                if row < len(self._choices):
                    self._context.loop.submit(self._requests[row])
            self._end_if_complete()

    def _row_done(self, row: int, event: Event) -> None:
        if isinstance(event, SglError):
            self._end(event)
        elif isinstance(event, Generation):
            self._results[row] = event
            self._awaited.discard(row)
            self._end_if_complete()

    def _end_if_complete(self) -> None:
        if not self._awaited:
            self._end(self._selection())

    def _end(self, outcome: Selection | SglError) -> None:
        if isinstance(outcome, RequestAbortedError):  # of one row
            outcome.partial = self.partial()
        with self._lock:
            if self._ended:
                return
            self._ended = True
        if isinstance(outcome, SglError):
            self.abort()
        self._sink(outcome)

    def _selection(self) -> Selection:
        count = len(self._choices)
        firsts: dict[int, float] = {}
        if self._prompt is not None:
            firsts = {token: logprob for logprob, token, _ in self._prompt.output_logprobs[0].ids}
        scores = []
        for row, choice in enumerate(self._choices):
            ids = tuple(self._requests[row].tokens[self._start :].tolist())
            result = self._results.get(row)
            logprobs = [firsts[ids[0]]] if firsts else []
            logprobs += [e.logprob for e in result.prompt_logprobs if e.logprob is not None] if result else []
            unconditional = self._unconditional_logprobs(count + row) if self._unconditional else None
            scores.append(ChoiceScore(choice, ids, tuple(logprobs), unconditional))
        results = [*self._results.values(), *([] if self._prompt is None else [self._prompt])]
        cached = list(map(self._cached, range(len(self._requests))))
        media = [(r.media, r.prompt_len, found) for r, found in zip(self._requests, cached) if r.media is not None]
        return Selection(
            tuple(scores),
            Usage(
                prompt_tokens=sum(request.prompt_len for request in self._requests),
                cached_tokens=sum(cached),
                queue_s=min(result.usage.queue_s for result in results),
                first_token_s=max(result.usage.total_s for result in results),
                total_s=max(result.usage.total_s for result in results),
                image_tokens=sum(images.before(length) for images, length, _ in media),
                cached_image_tokens=sum(images.before(found) for images, _, found in media),
            ),
            meta=self._meta(),
        )

    @property
    def _unconditional(self) -> bool:
        """True if the choices are also scored without the prompt."""
        return len(self._requests) > len(self._choices)

    def _cached(self, row: int) -> int:
        """Number of cached tokens of a row. The request for the prompt counts as that of the first row."""
        if self._prompt is not None and row == 0:
            return self._prompt.usage.cached_tokens
        return self._results[row].usage.cached_tokens if row in self._results else self._start

    def _meta(self) -> dict[str, object]:
        """Reason why tokens of the prompt were not cached, taken from the row that computed most."""
        if self._prompt is not None:
            miss = self._prompt.meta.get("cache_miss")
            return {} if miss is None else {"cache_miss": miss}
        rows = range(len(self._choices))
        row = max(rows, key=lambda i: self._results[i].usage.prompt_tokens - self._results[i].usage.cached_tokens)
        miss = self._results[row].meta.get("cache_miss")
        if miss is None:
            return {}
        left = miss.get("left")
        return {"cache_miss": miss if left is None else {**miss, "left": max(left - len(self._choices[row]), 0)}}

    def _unconditional_logprobs(self, row: int) -> tuple[float | None, ...]:
        """Log-probabilities of a choice without the prompt. The first is None unless the model has a
        beginning-of-sequence token to precede it."""
        found = tuple(e.logprob for e in self._results[row].prompt_logprobs)
        has_start = self._context.tokenizer.bos_id == self._requests[row].tokens[0]
        return found if has_start else (None, *found)
