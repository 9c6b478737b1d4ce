"""A running generation of a branch: its requests, one per sample, and their results."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeAlias

import msgspec

from sglang_lite.protocol import Delta, Generation, SglError
from sglang_lite.runtime.core.branch_text import OpenGrammar
from sglang_lite.runtime.core.engine_parts import EngineParts
from sglang_lite.runtime.output_builder import Event
from sglang_lite.runtime.request import Request
from sglang_lite.runtime.resolved_params import ResolvedParams
from sglang_lite.runtime.schedule_hints import ScheduleHints
from sglang_lite.runtime.structured_output.base import CompiledGrammar, Matcher
from sglang_lite.runtime.tokens.token_log import TokenLog

Done: TypeAlias = Callable[["GenerationJob", Generation, bool], "Request | None"]


class GenerationJob:
    """Generation of a `Gen` node for a branch.

    Args:
        parts: parts of the engine.
        params: resolved parameters of the generation.
        tell: callback for each event of each sample.
        done: callback for the end of all samples, called with this job, the first sample's result, and True if another
            request can continue in its slot; returns that request or None.
        stream: whether to send deltas.
        namespace: namespace in the prefix tree.
        hints: scheduling hints of the branch.
    """

    def __init__(
        self,
        parts: EngineParts,
        params: ResolvedParams,
        send: Callable[[Delta | Generation | SglError], None],
        done: Done,
        *,
        stream: bool,
        namespace: str,
        hints: ScheduleHints,
    ) -> None:
        self._parts, self._params, self._send, self._done = parts, params, send, done
        self._stream, self._namespace, self._hints = stream, namespace, hints
        self._generations: dict[int, Generation] = {}
        self._requests: list[Request] = []
        self._submitted = self._aborted = False

    @property
    def texts(self) -> list[str]:
        """Texts of the finished samples, in order of their index."""
        return [generation.text for _, generation in sorted(self._generations.items())]

    def make(
        self,
        log: TokenLog,
        grammar: Future[CompiledGrammar] | None,
        matcher: Future[Matcher] | None,
        within: OpenGrammar | None = None,
    ) -> None:
        """Makes the requests. May be called on the loop's thread only if no grammar has to be advanced over existing
        text.

        Args:
            log: prompt of the branch.
            grammar: compiled grammar of the constraint, if any.
            matcher: matcher made from that grammar in advance, for a single request.
            within: grammar that the text before is in, if any.

        Raises:
            ParameterError: the prompt has grown too long.
            ConstraintError: the constraint can't be enforced, or the open grammar does not allow the text before.
        """
        requests = self._parts.builder.build(
            log.ids(), self._params, partial(self._on_event, 0), stream=self._stream, namespace=self._namespace
        )
        for index, request in enumerate(requests):
            request.hints, request.priority = self._hints, self._hints.priority
            request.output.sink = partial(self._on_event, index)
        compiled = None if grammar is None else grammar.result()
        if within is not None:
            compiled = self._parts.compiler.continued(within.grammar, within.text, compiled)
        if matcher is not None and within is None and len(requests) == 1:
            requests[0].output.matcher = matcher.result()
        elif compiled is not None:
            for request in requests:
                request.output.matcher = compiled.matcher()
        if len(requests) == 1:
            requests[0].follow = self._follow
        self._requests = requests

    def in_slot(self) -> Request:
        """Returns the only request, which is about to continue in the slot of another one. On the loop's thread."""
        self._submitted = True
        return self._requests[0]

    def submit(self) -> None:
        """Submits the requests. On the loop's thread."""
        self._submitted = True
        for request in self._requests:
            self._parts.loop.receive(request)

    def abort(self) -> None:
        """Aborts the requests; no more events are sent for them. On the loop's thread."""
        self._aborted = True
        if self._submitted:
            for index, request in enumerate(self._requests):
                if index not in self._generations:
                    self._parts.loop.abort(request)

    def fail(self, error: SglError) -> None:
        if not self._aborted:
            self._send(error)

    def _on_event(self, index: int, event: Event) -> None:
        if self._aborted:
            return
        self._send(msgspec.structs.replace(event, index=index) if index and not isinstance(event, SglError) else event)
        if isinstance(event, Generation):
            self._generations[index] = event
            count = len(self._requests)
            if len(self._generations) < count:
                return
            self._requests = []  # breaks the reference cycle, so that no garbage collection is needed
            if count > 1:
                self._done(self, self._generations[0], False)

    def _follow(self, generation: Generation) -> Request | None:
        return None if self._aborted else self._done(self, generation, True)
