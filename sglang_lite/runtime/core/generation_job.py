"""A running generation of a program: its requests, one per sample, and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from sglang_lite.constraints.json_schema.repeats import repeat_rules
from sglang_lite.program.nodes import Gen
from sglang_lite.protocol import Constraint, Continuation, Generation, SglError, Span
from sglang_lite.runtime.core.prepared_node import EngineAsk, PreparedNode
from sglang_lite.runtime.core.token_text import OpenGrammar
from sglang_lite.runtime.requests.output_builder import Event
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.requests.resolved_params import ResolvedParams
from sglang_lite.runtime.requests.schedule_hints import ScheduleHints
from sglang_lite.runtime.tokens.token_log import TokenLog

if TYPE_CHECKING:
    from sglang_lite.runtime.core.engine_program import EngineProgram


class GenerationJob:
    """Generation of a `Gen` node. All methods but `_prepare` run on the loop's thread.

    Args:
        program: program of the node; told of all events.
        ask: the node. Nothing is told of it once it was given up.
        hints: scheduling hints of its branch.

    Attributes:
        following: generation that follows it, once that is prepared.
    """

    def __init__(self, program: EngineProgram, ask: EngineAsk, hints: ScheduleHints) -> None:
        self._program, self._ask, self._hints = program, ask, hints
        self._began = program.context.loop.clock.now()
        self._generations: dict[int, Generation] = {}
        self._requests: list[Request] = []
        self._submitted = False
        self.following: PreparedNode | None = None

    def start(self, *, in_slot: bool = False) -> Request | None:
        """Starts once what other threads prepare is ready.

        Args:
            in_slot: whether a request of the branch has just ended in whose slot the next one can continue.

        Returns:
            The next request, if it continues in the slot; else None.
        """
        ask, entry, text = self._ask, self._ask.entry, self._ask.branch.text
        if not ask.is_current:
            return None
        assert text is not None
        if isinstance(entry.params, SglError):
            self._program.failed(ask, entry.params)
            return None
        for awaited in (entry.grammar, entry.ids, entry.matcher):
            if awaited is not None and not awaited.done():
                awaited.add_done_callback(lambda _: self._program.post(self.start))
                return None
        log = text.log
        if entry.ids is not None and entry.ids.exception() is None and log.fixed:
            spans = [*log.open, *text.new]
            if entry.text == spans:  # as predicted
                log.learn(spans, entry.ids.result())
                text.take_new()
        ready = not text.new and log.ready and text.grammar is None
        assert entry.params is not None
        if in_slot and ready and entry.params.n == 1 and (entry.grammar is None or entry.matcher is not None):
            try:
                self._make(log, entry.params)
            except SglError as error:
                self._program.failed(ask, error)
                return None
            self._submitted = True
            return self._requests[0]
        self._program.off_loop(partial(self._prepare, log, text.take_new(), entry.params, text.open_grammar()))
        return None

    def _prepare(
        self, log: TokenLog, new: Sequence[Span], params: ResolvedParams, within: OpenGrammar | None
    ) -> Callable[[], object]:
        # May change the log: its branch waits, and doesn't use it meanwhile.
        try:
            log.append(new)
            self._make(log, params, within)
        except SglError as error:
            return partial(self._program.failed, self._ask, error)
        return self._submit

    def _make(self, log: TokenLog, params: ResolvedParams, within: OpenGrammar | None = None) -> None:
        """Makes the requests. May be called on the loop's thread only if no grammar has to be advanced over existing
        text.

        Args:
            log: prompt of the branch.
            params: parameters of the generation.
            within: grammar that the text before is in, if any.

        Raises:
            ParameterError: the prompt has grown too long.
            ConstraintError: the constraint can't be enforced, or the open grammar does not allow the text before.
        """
        program, entry, node = self._program, self._ask.entry, self._ask.node
        assert isinstance(node, Gen)
        requests = program.context.builder.build(
            log.ids(), params, partial(self._on_event, 0),
            stream=program.stream or node.stream, namespace=program.namespace,
        )  # fmt: skip
        for index, request in enumerate(requests):
            request.hints, request.priority = self._hints, self._hints.priority
            request.output.sink = partial(self._on_event, index)
            request.times.deadline = None if node.timeout is None else self._began + node.timeout
        compiled = None if entry.grammar is None else entry.grammar.result()
        if within is not None:
            compiled = program.context.compiler.continued(within.grammar, within.text, compiled)
        rules = repeat_rules(_constraint(node, within), params.repeats)
        made = entry.matcher.result() if entry.matcher is not None and within is None and len(requests) == 1 else None
        if compiled is not None:
            for request in requests:
                request.output.matcher = request.matcher(compiled, made, rules=rules, goes_on=within is not None)
        if len(requests) == 1:
            requests[0].follow = self._follow
        self._requests = requests

    def _submit(self) -> None:
        if self._ask.is_current:
            self._submitted = True
            for request in self._requests:
                self._program.context.loop.receive(request)

    def abort(self) -> None:
        """Aborts the requests, as the node was given up."""
        if self._submitted:
            for index, request in enumerate(self._requests):
                if index not in self._generations:
                    self._program.context.loop.abort(request)

    def _on_event(self, index: int, event: Event) -> None:
        if not self._ask.is_current:
            return
        if isinstance(event, SglError):
            self._program.failed(self._ask, event)
            return
        self._program.tell(self._ask, msgspec.structs.replace(event, index=index) if index else event)
        if isinstance(event, Generation):
            self._generations[index] = event
            count = len(self._requests)
            if len(self._generations) < count:
                return
            self._requests = []  # breaks the reference cycle, so that no garbage collection is needed
            if count > 1:
                self._program.answered(self._ask, self._appended)

    def _follow(self, _: Generation) -> Request | None:
        return self._program.answered(self._ask, self._appended, in_slot=True)

    @property
    def _appended(self) -> Sequence[Span] | None:
        """Text that the first sample adds; None if the answer is judged."""
        node = self._ask.node
        return None if isinstance(node, Gen) and node.judged else self._generations[0].spans


def _constraint(node: Gen, within: OpenGrammar | None) -> Constraint | None:
    return node.constraint if within is None else Continuation(within.constraint, within.text, node.constraint)
