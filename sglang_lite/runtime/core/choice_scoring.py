"""Scores the choices of a `select` with one request per choice. These requests generate nothing and
only report log-probabilities.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from sglang_lite.program.prefixes import common_prefix_length
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
from sglang_lite.runtime.core.submission import SelectRequest
from sglang_lite.runtime.requests.output_builder import Event
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.requests.scheduled_branch import ScheduledBranch
from sglang_lite.runtime.tokens.image_span import MediaItem
from sglang_lite.runtime.tokens.token_log import TokenLog

_SCORE = SamplingParams(max_tokens=0, return_logprob=True)
_PROMPT = -1  # row of the prompt-only request


def _ignore_late_outcome(outcome: Selection | SglError) -> None:
    """Ignores an outcome after the first."""


class ChoiceScoring:
    """Scores the choices of a selection.

    Prompt and choice are tokenised together, like any text that follows text. If this merges tokens
    across the boundary for one choice, or a choice is empty, scoring starts before the boundary for
    all choices, so that every score covers the same text.

    The choices' requests share all but their last tokens, and run in one step. If much of the
    prompt is not cached, a prompt-only request runs before them and also reports the
    log-probabilities of their first tokens. Then the choices compute neither the prompt nor its
    last token, and a choice of one token computes nothing. This is not done if a choice invokes a
    late adapter (aLoRA) at another position than the prompt does: the keys and values before the
    choice then differ, and every choice computes its own.

    Args:
        context: context of the engine.
        sink: callback for the scores or the error; called once.
    """

    def __init__(
        self, context: EngineContext, sink: Callable[[Selection | SglError], None]
    ) -> None:
        self._context = context
        self._sink = sink
        self._choices: Sequence[str] = ()
        self._start = 0  # index of the first scored token in the choices' rows
        # used on the loop's thread only
        self._ended = False
        # prompt-only request, which may never be submitted; None before scoring begins
        self._prompt: Request | None = None
        self._requests: list[Request] = []  # one per row: choices, then choices without the prompt
        self._awaited: set[int] = set()  # rows without a result yet
        self._results: dict[int, Generation] = {}  # by row

    def start_request(self, log: TokenLog, request: SelectRequest) -> None:
        """Submits the requests of a selection; raises like `start`.

        Args:
            log: prompt before the choices.
            request: the selection.
        """
        self.start(
            log,
            tuple(request.choices),
            unconditional=request.unconditional,
            namespace=request.namespace,
            # in a turn, choices are plain content
            special=isinstance(request.prompt, str) or request.prompt.role is None,
            lora_path=UNSET if request.lora_path is None else (request.lora_path,),
        )

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
        """Submits the requests, unless the scoring has been aborted. Can be slow, so it must not be
        called on the loop's thread.

        Args:
            log: prompt before the choices.
            choices: texts to score.
            unconditional: whether to also score the choices without the prompt.
            namespace: namespace in the radix tree.
            special: whether the choices can name special tokens.
            lora_path: adapter that scores, as in SamplingParams.
            branch: program's branch, if any.

        Raises:
            ParameterError: the prompt is too long, the adapter is missing, or a choice is empty or
                has no tokens although it follows no text or is also scored without the prompt.
        """
        self._choices = choices
        if unconditional and not all(choices):
            raise ParameterError(
                "choices",
                "an empty one can't be scored without the prompt.",
                hint="Use another choices_method.",
            )
        texts = [Span(choice, special=special) for choice in choices]
        rows = self._tokenize_choices(log, texts)
        self._start = rows[0][1]
        before = self._make_prompt_request(
            [ids for ids, _ in rows], namespace, log.media, lora_path
        )
        if unconditional:
            rows += [(log.encode([text], alone=True), 1) for text in texts]
        builder = self._context.builder
        params = builder.resolve_with_defaults(msgspec.structs.replace(_SCORE, lora_path=lora_path))
        requests = [
            request
            for row, (ids, start) in enumerate(rows)
            for request in builder.build_requests(
                ids,
                params,
                partial(self._receive_row, row),
                namespace=namespace,
                score_from=start,
                media=log.media if row < len(choices) else (),
            )
        ]
        for request in (before, *requests[: len(choices)]):  # the rows that contain the prompt
            request.branch = branch
            request.priority = 0 if branch is None else branch.program.priority
        self._context.loop.inbox.post(partial(self._submit_rows, before, requests))

    def abort(self) -> None:
        """Ends the scoring with RequestAbortedError, unless it has ended. Sends no event if it has
        not been started. Can be called on any thread.
        """
        self._context.loop.inbox.post_if_open(self._abort)

    def partial_result(self) -> Generation | None:
        """Returns the result to report if the scoring is aborted. It has no text, and its usage has
        the prompt tokens of all rows. Returns None if nothing was submitted or the scoring has
        ended.
        """
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
        """Builds the request for the text before the choices, which reports the log-probabilities
        of the choices' first tokens.
        """
        firsts = tuple({ids[self._start] for ids in rows})
        asked = SamplingParams(
            max_tokens=0,
            temperature=0,
            return_logprob=True,
            token_ids_logprob=firsts,
            lora_path=lora_path,
        )
        builder = self._context.builder
        prompt = rows[0][: self._start]
        (request,) = builder.build_requests(
            prompt,
            builder.resolve_with_defaults(asked),
            partial(self._receive_row, _PROMPT),
            namespace=namespace,
            media=media,
        )
        return request

    def _submit_rows(self, before: Request, requests: list[Request]) -> None:
        """Submits the prompt-only request first if that saves time, otherwise all choices together.
        Runs on the loop's thread.
        """
        if self._ended:
            return
        loop = self._context.loop
        count = len(self._choices)
        store = loop.scheduler.store
        cached = store.tree.cached_length(*before.space.tree_key(before.tokens))
        # number of tokens of the prompt that each choice would compute
        again = max(len(before.tokens) // store.page_size * store.page_size - cached, 1)
        self._prompt = before
        self._requests = requests
        submitted = requests
        self._awaited = set(range(len(requests)))
        alike = all(
            each.space.common_length_with(before.space, self._start) == self._start
            for each in requests[:count]
        )
        if alike and again * (count - 1) >= self._context.step_cost:
            for row, request in enumerate(requests[:count]):
                request.score_from = self._start + 1
                if len(request.tokens) == self._start + 1:  # no token is left to compute
                    self._awaited.remove(row)
            self._awaited.add(_PROMPT)
            submitted = [before, *requests[count:]]
        for request in submitted:
            loop.receive_request(request)

    def _abort(self) -> None:
        if self._prompt is None:
            self._ended = True
            return
        for request in (self._prompt, *self._requests):
            self._context.loop.abort(request)

    def _tokenize_choices(
        self, log: TokenLog, choices: Sequence[Span]
    ) -> list[tuple[array[int], int]]:
        """Returns two values for each choice: the token ids of prompt and choice together, and the
        index of the first token to score.
        """
        if not (log.fixed or log.open or all(choice.text for choice in choices)):
            raise ParameterError(
                "choices", "an empty one needs text before it.", hint="Add text, or leave it out."
            )
        tail = log.encode(log.open) if log.open or not log.fixed else array("i")
        together = [log.encode([*log.open, choice]) for choice in choices]
        start = min(common_prefix_length(tail, ids) for ids in together)
        start = len(log.fixed) + min(start, *(len(ids) - 1 for ids in together))
        if start < 0:
            unknown = next(choice.text for choice, ids in zip(choices, together) if not ids)
            raise ParameterError(
                "choices", f"{unknown!r:.60} has no tokens for this model.", hint="Leave it out."
            )
        # nothing precedes the first token, so a beginning-of-sequence token is inserted
        if start == 0:
            tokenizer = self._context.tokenizer
            bos = (
                min(tokenizer.eos_ids, default=0) if tokenizer.bos_id is None else tokenizer.bos_id
            )
            return [(array("i", [bos]) + log.fixed + ids, 1) for ids in together]
        return [(log.fixed + ids, start) for ids in together]

    def _receive_row(self, row: int, event: Event) -> None:
        if isinstance(event, SglError):
            self._finish_scoring(event)
        elif isinstance(event, Generation):
            self._results[row] = event
            self._awaited.discard(row)
            if row == _PROMPT:
                for choice, request in enumerate(self._requests[: len(self._choices)]):
                    if choice in self._awaited:
                        self._context.loop.submit_request(request)
            if not self._awaited:
                self._finish_scoring(self._build_selection())

    def _finish_scoring(self, outcome: Selection | SglError) -> None:
        if self._ended:
            return
        if isinstance(outcome, RequestAbortedError):  # one row was aborted
            outcome.partial = self.partial_result()
        self._ended = True
        if isinstance(outcome, SglError):
            self._abort()
        sink = self._sink
        # Requests and sink refer to this object. Breaking the cycle frees all of them now, not only
        # when the garbage collector runs.
        self._prompt = None
        self._requests = []
        self._sink = _ignore_late_outcome
        sink(outcome)

    def _build_selection(self) -> Selection:
        count = len(self._choices)
        firsts: dict[int, float] = {}
        if _PROMPT in self._results:
            firsts = {
                token: logprob
                for logprob, token, _ in self._results[_PROMPT].output_logprobs[0].ids
            }
        scores = []
        for row, choice in enumerate(self._choices):
            ids = tuple(self._requests[row].tokens[self._start :].tolist())
            result = self._results.get(row)
            logprobs = [firsts[ids[0]]] if firsts else []
            logprobs += (
                [e.logprob for e in result.prompt_logprobs if e.logprob is not None]
                if result
                else []
            )
            unconditional = (
                self._unconditional_logprobs(count + row) if self._unconditional else None
            )
            scores.append(ChoiceScore(choice, ids, tuple(logprobs), unconditional))
        results = self._results.values()
        cached = list(map(self._cached_tokens_of_row, range(len(self._requests))))
        media = [
            (r.media, r.prompt_len, found)
            for r, found in zip(self._requests, cached)
            if r.media is not None
        ]
        return Selection(
            tuple(scores),
            Usage(
                prompt_tokens=sum(request.prompt_len for request in self._requests),
                cached_tokens=sum(cached),
                queue_s=min(result.usage.queue_s for result in results),
                first_token_s=max(result.usage.total_s for result in results),
                total_s=max(result.usage.total_s for result in results),
                image_tokens=sum(
                    images.count_image_tokens_before(length) for images, length, _ in media
                ),
                cached_image_tokens=sum(
                    images.count_image_tokens_before(found) for images, _, found in media
                ),
            ),
            meta=self._cache_miss_meta(),
        )

    @property
    def _unconditional(self) -> bool:
        """True if the choices are also scored without the prompt."""
        return len(self._requests) > len(self._choices)

    def _cached_tokens_of_row(self, row: int) -> int:
        """Returns a row's number of cached tokens. For the first row, returns that of the
        prompt-only request, if there was one.
        """
        result = self._results.get(_PROMPT if row == 0 and _PROMPT in self._results else row)
        return self._start if result is None else result.usage.cached_tokens

    def _cache_miss_meta(self) -> dict[str, object]:
        """Returns the reason why tokens of the prompt were not cached, taken from the row that
        computed most.
        """
        if _PROMPT in self._results:
            miss = self._results[_PROMPT].meta.get("cache_miss")
            return {} if miss is None else {"cache_miss": miss}
        rows = range(len(self._choices))
        row = max(
            rows,
            key=lambda i: (
                self._results[i].usage.prompt_tokens - self._results[i].usage.cached_tokens
            ),
        )
        miss = self._results[row].meta.get("cache_miss")
        if miss is None:
            return {}
        left = miss.get("left")
        return {
            "cache_miss": miss
            if left is None
            else {**miss, "left": max(left - len(self._choices[row]), 0)}
        }

    def _unconditional_logprobs(self, row: int) -> tuple[float | None, ...]:
        """Returns the log-probabilities of a choice without the prompt. The first one is None if
        the model has no beginning-of-sequence token.
        """
        found = tuple(e.logprob for e in self._results[row].prompt_logprobs)
        has_start = self._context.tokenizer.bos_id == self._requests[row].tokens[0]
        return found if has_start else (None, *found)
