"""Callbacks that wake readers after a step: once, for all that the step told them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from sglang_lite.runtime.core.inbox import Inbox

logger = logging.getLogger("sglang_lite")
E = TypeVar("E")


class Flushes:
    """
    Args:
        inbox: of the loop whose steps tell events.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._flushes: dict[Callable[[], object], None] = {}  # to be called after the step, in this order

    def flushed(self, sink: Callable[[E], object], flush: Callable[[], object] | None) -> Callable[[E], None]:
        """A sink with `flush` called after it: once for all that a step tells such sinks."""

        def tell(event: E) -> None:
            sink(event)
            if flush is None:
                return
            if self._inbox.runs_here:
                self._flushes[flush] = None
            else:
                flush()

        return tell

    def flush(self) -> None:
        """Wakes who was told something. On the loop's thread."""
        flushes, self._flushes = self._flushes, {}
        for flush in flushes:
            try:
                flush()
            except Exception:  # the caller's code: an event loop that was closed, say
                logger.exception("the reader of a step's events could not be woken")
