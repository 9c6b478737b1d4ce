"""Ends of requests: their results, and the next requests of their programs, which start in their slots."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from sglang_lite.protocol import SglError
from sglang_lite.runtime.core.encoding import Encoding
from sglang_lite.runtime.core.postponed import Postponed
from sglang_lite.runtime.core.token_reader import TokenReader
from sglang_lite.runtime.requests.output_builder import Finish
from sglang_lite.runtime.requests.request import Request, State
from sglang_lite.runtime.scheduler.scheduler import Scheduler


class RequestEnds:
    """Ender of requests, on the loop's thread.

    Args:
        scheduler: its queues have the requests.
        reader: prepares the next ones.
        postponed: work that waits until the device computes.
        encoding: requests that wait for features of their images; None if there are none.
        receive: function that starts a request outside of a slot.
        fail: function that ends a request with an error.
    """

    def __init__(
        self, scheduler: Scheduler, reader: TokenReader, postponed: Postponed, encoding: Encoding | None,
        receive: Callable[[Request], None], fail: Callable[[Request, SglError], None],
    ) -> None:  # fmt: skip
        self._scheduler, self._reader, self._postponed, self._encoding = scheduler, reader, postponed, encoding
        self._receive, self._fail = receive, fail

    def finish(self, request: Request, finish: Finish) -> None:
        """Ends a request with its result, or starts the next request of its program in its slot."""
        if self._scheduler.drafts is not None:
            self._scheduler.drafts.learn(request)
        if request.follow is None:
            self._scheduler.finish(request, State.FINISHED)
            request.output.send(request.generation(finish))
            return
        table = self._scheduler.store.table
        request.tokens = table.tokens[request.slot, : table.known[request.slot]].copy()
        report = partial(self._report, request, finish)
        begun = request.follow.begin(request.tokens, finish, partial(self._postponed.add, report))
        if begun is not None:
            self._keep_images(begun)
            self._scheduler.continue_in_slot(request, begun, appended=True)
            return
        following = report()
        if following is None:
            self._scheduler.finish(request, State.FINISHED)
            return
        if following.media is not None and not self._keep_images(following):
            self._scheduler.finish(request, State.FINISHED)
            self._receive(following)
            return
        try:
            self._reader.prepare(following)
        except SglError as error:
            self._scheduler.finish(request, State.FINISHED)
            self._fail(following, error)
        else:
            self._scheduler.continue_in_slot(request, following)

    def _keep_images(self, request: Request) -> bool:
        """Keeps the features of a request that continues in a slot. Returns False if some are not there."""
        return request.media is None or (self._encoding is not None and self._encoding.keep(request))

    def _report(self, request: Request, finish: Finish) -> Request | None:
        """Sends the result of a request, and continues its program. Returns the request that follows in its slot, if
        that has not begun."""
        assert request.follow is not None
        generation = request.generation(finish)
        request.output.send(generation)
        return request.follow.go_on(generation)
