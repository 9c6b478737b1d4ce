"""Computes distributions of the next token for a search of texts, by a request for one token each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sglang_lite.protocol import Delta, Generation, SglError
from sglang_lite.runtime.exact.beginnings import Beginning, MassRow
from sglang_lite.runtime.exact.outcome_reader import OutcomeReader
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.requests.output_builder import Event
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.requests.resolved_params import ResolvedParams
from sglang_lite.runtime.structured_output.outcomes import Outcomes

if TYPE_CHECKING:
    from sglang_lite.runtime.core.engine_context import EngineContext


class MassRows:
    """Rows of a request: distributions of the next token after beginnings of its text. All methods
    are called on the loop's thread.

    Args:
        context: context of the engine.
        request: request whose adapter, images and priority are used.
        prompt: tokens before the beginnings, int32.
        origin: what the rows are for; rows of the same origin are alike.
        receive: receives each row that was computed.
        fail: receives the error of a row.

    Attributes:
        first: result of the first row; None before it.
        computed: number of rows that were computed.
        steps: number of calls of `submit` that had rows.
    """

    def __init__(
        self,
        context: EngineContext,
        request: Request,
        prompt: Ints,
        origin: Hashable,
        receive: Callable[[MassRow], None],
        fail: Callable[[SglError], None],
    ) -> None:
        self._context = context
        self._request = request
        self._prompt = prompt
        self._origin = origin
        self._receive = receive
        self._fail = fail
        self._params = _parameters_of_rows(request.params)
        self._open: dict[Request, tuple[Beginning, OutcomeReader]] = {}  # not computed yet
        self.first: Generation | None = None
        self.computed = 0
        self.steps = 0

    @property
    def open(self) -> bool:
        """Whether rows are being computed."""
        return bool(self._open)

    def submit(
        self, beginnings: Sequence[Beginning], outcomes: Sequence[Outcomes]
    ) -> list[Beginning]:
        """Submits the requests that compute rows. Returns the beginnings that are too long for the
        context, which have none.

        Args:
            beginnings: the beginnings.
            outcomes: outcomes of the next token after each of them.
        """
        too_long = []
        for beginning, each in zip(beginnings, outcomes, strict=True):
            tokens = np.concatenate((self._prompt, np.array(beginning.tokens, dtype=np.int32)))
            row = self._context.builder.build_alike(self._request, self._params, tokens)
            if row is None:
                too_long.append(beginning)
                continue
            row.output.sink = partial(self._receive_event, row)
            row.output.origin = self._origin
            row.processor = reader = OutcomeReader(each)
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
        self._receive(reader.read_row(beginning))

    def abort(self) -> None:
        """Aborts the rows that are being computed. None of them is received any more."""
        rows = list(self._open)
        self._open = {}
        for row in rows:
            self._context.loop.abort(row)


def _parameters_of_rows(params: ResolvedParams) -> ResolvedParams:
    """Returns the parameters of a request that only computes the distribution of a next token."""
    return replace(
        params,
        max_tokens=1,
        n=1,
        temperature=0,
        seed=0,  # so that no draw of the engine's own seeds is used up
        exact=False,
        ignore_eos=True,
        return_prompt_token_ids=False,
    )
