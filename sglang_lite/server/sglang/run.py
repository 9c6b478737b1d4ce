"""Runs native requests on an engine's core: each prompt is submitted as soon as there is room for
it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from sglang_lite.protocol import (
    BatchError,
    Delta,
    Generation,
    OverloadedError,
    RequestAbortedError,
    SglError,
)
from sglang_lite.protocol.anything import Json
from sglang_lite.server.sglang.answer import SampleAnswer
from sglang_lite.server.sglang.request import NativeRequest

if TYPE_CHECKING:
    from sglang_lite.engine.core import Core
    from sglang_lite.runtime.core.open_requests import Ticket
    from sglang_lite.runtime.core.submission import GenerateRequest
    from sglang_lite.runtime.requests.output_builder import Event

Post: TypeAlias = "Callable[[tuple[int, Event] | None], object]"


class NativeRun:
    """Running native request: collects its events, and builds its answers.

    Args:
        engine: core that runs the request.
        post: function called on the engine's thread with each event, and with None when there is
            room for more; its argument is to be passed to `add_event`, on a thread of the caller's
            choice.
        request: request to run.
        flush: function called on the engine's thread after `post`, once for all events that arrive
            together.
        own_name: function that takes the caller's name of a request and returns the engine's name.
            Answers have the caller's name.

    Raises:
        ParameterError, OverloadedError, EngineClosedError: a prompt was refused, or has more
            samples than may ever wait; nothing runs. A request that has no room because of others
            doesn't fail, but waits for its turn.
    """

    def __init__(
        self,
        engine: Core,
        post: Post,
        request: NativeRequest,
        flush: Callable[[], object] | None = None,
        own_name: Callable[[str], str] = str,
    ) -> None:
        self._engine = engine
        self._post = post
        self._request = request
        self._flush = flush
        self._answers: list[SampleAnswer] = []
        # with the index of the call's first answer
        self._waiting: deque[tuple[int, GenerateRequest]] = deque()
        decode = partial(engine.tokenizer.decode, skip_special=False)
        in_list = request.is_list and request.stream
        for number, call in enumerate(request.calls):
            try:
                checked = engine.builder.validate_request(call)
            except SglError as error:
                error.add_note(f"in prompt {number} of {len(request.calls)}")
                raise
            ids: Any = checked.prompt
            first = len(self._answers)
            assert call.rid is not None  # `read_request` names each
            self._waiting.append((first, replace(checked, rid=own_name(call.rid))))
            for index in range(first, first + call.samples):
                rid = call.rid if call.samples == 1 else f"{call.rid}_{index - first}"
                place = index if in_list else None
                version = engine.config.weight_version
                self._answers.append(
                    SampleAnswer(call, ids, place, decode, rid=rid, weight_version=version)
                )
        # the samples of a call share one ticket
        self._tickets: list[Ticket | None] = [None] * len(self._answers)
        self._open = len(self._answers)
        self._running = 0  # samples whose last event has not arrived
        # callback that waits for room in the engine, if any
        self._call: Callable[[], object] | None = None
        self._submit_waiting()

    def _submit_waiting(self) -> None:
        """Submits waiting prompts until the engine has no more room. The others are submitted
        later.
        """
        while self._waiting:
            first, call = self._waiting[0]
            try:
                ticket = self._engine.submit(
                    call, partial(_post_with_index, self._post, first), self._flush
                )
            except OverloadedError:
                if self._running:
                    return
                first = self._call is not None
                self._call = partial(self._post, None)
                self._engine.open_requests.wait_for_room(self._call, call.samples, first=first)
                return
            except SglError:
                self.abort()
                raise
            self._waiting.popleft()
            self._tickets[first : first + call.samples] = [ticket] * call.samples
            self._running += call.samples
            self._call = None

    @property
    def open(self) -> bool:
        """True while more events are expected."""
        return self._open > 0

    def add_event(self, item: tuple[int, Event] | None) -> list[Json]:  # dictionaries
        """Adds an event, and returns the answers that it has changed, in their current state.

        Args:
            item: argument of `post`.

        Raises:
            SglError: the only prompt failed, and the answer is streamed.
        """
        if item is None:
            self._submit_waiting()
            return []
        at, event = item
        ticket = self._tickets[at]
        changed = [self._answers[at]]
        assert ticket is not None
        # ends all samples
        if isinstance(event, SglError) and not isinstance(event, RequestAbortedError):
            ticket.abort()
            changed = [answer for answer, t in zip(self._answers, self._tickets) if t is ticket]
        changed = [answer for answer in changed if answer.outcome is None]
        dictionaries = [answer.add_event(event, ticket.cached_tokens) for answer in changed]
        self._open -= sum(answer.outcome is not None for answer in changed)
        if not isinstance(event, Delta):
            self._running -= 1
            self._submit_waiting()
        if self._request.stream and not self._request.is_list:
            self.results()
        return dictionaries

    def results(self) -> Any:  # a dictionary, or a list of dictionaries and errors
        """Returns the current state of all answers: one dictionary, or a list.

        Raises:
            SglError: the only prompt failed.
            BatchError: some prompts of a list failed; `results` of the error are dictionaries and
                exceptions.
        """
        outcomes = [answer.outcome for answer in self._answers]
        failures = [outcome for outcome in outcomes if isinstance(outcome, SglError)]
        if failures and not self._request.is_list:
            raise failures[0]
        if failures:
            which = outcomes.index(failures[0])
            count = f"{len(failures)} of {len(outcomes)} requests failed"
            raise BatchError(f"{count}; the first at index {which}: {failures[0]}", outcomes)
        return outcomes if self._request.is_list else outcomes[0]

    def abort(self) -> None:
        """Aborts all samples that have not ended."""
        self._waiting.clear()
        call = self._call
        self._call = None
        if call is not None:
            self._engine.open_requests.give_up_place(call)
        for answer, ticket in zip(self._answers, self._tickets):
            if ticket is not None and answer.outcome is None:
                ticket.abort()

    def abort_soon(self) -> None:
        """Schedules `abort` on the engine's thread. Meant for the garbage collector, which may run
        on a thread that holds a lock.
        """
        self._engine.call_soon(self.abort)


def _post_with_index(post: Post, first: int, event: Event) -> None:
    result = event.partial if isinstance(event, RequestAbortedError) else event
    index = result.index if isinstance(result, Delta | Generation) else 0
    post((first + index, event))
