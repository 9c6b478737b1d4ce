"""Computes distributions of the next token for the waiting samples of a generation. Each
distribution takes a request for one token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sglang_lite.protocol import BackendError, Delta, Generation, SglError
from sglang_lite.runtime.exact.beginnings import Beginning, MassRow
from sglang_lite.runtime.exact.outcome_reader import OutcomeReader
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.output_builder import Event, Sink
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.requests.resolved_params import ResolvedParams
from sglang_lite.runtime.structured_output.outcomes import Outcomes

if TYPE_CHECKING:
    from sglang_lite.runtime.core.engine_context import EngineContext


logger = logging.getLogger("sglang_lite")


class MassRows:
    """Rows of a generation: distributions of the next token after beginnings of its text. All
    methods are called on the loop's thread.

    Args:
        context: context of the engine.
        requests: requests that wait for the rows, one for each sample. None of them is scheduled.
        prompt: tokens before the beginnings, int32.
        origin: identifies what requested the rows, such as a constraint; texts of rows with the
            same origin are similar.
        receive: receives each row that was computed.

    Attributes:
        first: result of the first computed row, or None.
        computed: number of rows that were computed.
        steps: number of calls of `submit` that had rows.
    """

    def __init__(
        self,
        context: EngineContext,
        requests: Sequence[Request],
        prompt: Ints,
        origin: Hashable,
        receive: Callable[[MassRow], None],
    ) -> None:
        self._context = context
        self._requests = requests
        self._sinks: Sequence[Sink] = ()  # original sinks of the watched requests
        self._prompt = prompt
        self._origin = origin
        self._receive = receive
        self._params = _parameters_of_rows(requests[0].params)
        # rows that are not computed yet
        self._open: dict[Request, tuple[Beginning, OutcomeReader]] = {}
        self.first: Generation | None = None
        self.computed = 0
        self.steps = 0

    def watch_requests(self) -> None:
        """Aborts the rows as soon as all requests have ended, for example because they were
        aborted.
        """
        self._sinks = [request.output.sink for request in self._requests]
        for request, sink in zip(self._requests, self._sinks, strict=True):
            request.output.sink = partial(self._pass_on, sink)

    def _pass_on(self, sink: Sink, event: Event) -> None:
        sink(event)
        if self._open and not self.are_needed:
            self._abort()

    @property
    def are_needed(self) -> bool:
        """Whether a request still waits for the rows."""
        return not all(request.ended for request in self._requests)

    def release_requests(self) -> None:
        """Forgets the requests, because they no longer wait for rows."""
        for request, sink in zip(self._requests, self._sinks, strict=True):
            if not request.ended:
                request.output.sink = sink
        self._requests = ()  # breaks reference cycles
        self._sinks = ()

    @contextmanager
    def failing_requests(self) -> Iterator[None]:
        """Ends the requests with an error if the code in the `with` block raises one. The error
        must neither end the loop nor leave the requests open.
        """
        try:
            yield
        except SglError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("rows of a generation failed")
            self._fail(BackendError(f"the distributions of a generation failed: {error!r}"))

    def _fail(self, error: SglError) -> None:
        """Ends the requests with an error, and aborts the rows that are still being computed."""
        requests = self._requests
        self._abort()
        for request in requests:
            if not request.ended:
                self._context.loop.fail_before_start(request, copy(error))

    def _abort(self) -> None:
        rows = list(self._open)
        self._open = {}
        self.release_requests()
        for row in rows:
            self._context.loop.abort(row)

    @property
    def open(self) -> bool:
        """Whether rows are being computed."""
        return bool(self._open)

    def submit(
        self, beginnings: Sequence[Beginning], outcomes: Sequence[Outcomes]
    ) -> list[Beginning]:
        """Submits the requests that compute rows. Returns the beginnings that are too long for the
        context and got no request.

        Args:
            beginnings: the beginnings.
            outcomes: outcomes of the next token after each of them.
        """
        too_long = []
        for beginning, each in zip(beginnings, outcomes, strict=True):
            tokens = np.concatenate((self._prompt, np.array(beginning.tokens, dtype=np.int32)))
            row = self._context.builder.build_alike(self._requests[0], self._params, tokens)
            if row is None:
                too_long.append(beginning)
                continue
            row.output.sink = partial(self._receive_event, row)
            row.output.origin = self._origin
            reader = OutcomeReader(each)
            row.processor = reader
            self._open[row] = beginning, reader
        self.steps += self.open
        for row in list(self._open):
            self._context.loop.receive_request(row)
        return too_long

    def _receive_event(self, row: Request, event: Event) -> None:
        if row not in self._open or isinstance(event, Delta):
            return
        if isinstance(event, SglError):
            self._fail(event)
            return
        if self.first is None:
            self.first = event
        beginning, reader = self._open.pop(row)
        self.computed += 1
        with self.failing_requests():
            self._receive(reader.read_row(beginning))


def _parameters_of_rows(params: ResolvedParams) -> ResolvedParams:
    """Returns the parameters of a request that only computes the distribution of a next token."""
    return replace(
        params,
        max_tokens=1,
        n=1,
        temperature=0,
        seed=0,  # so that no seed is drawn from the engine's generator
        exact=False,
        heal=False,
        ignore_eos=True,
        return_prompt_token_ids=False,
    )
