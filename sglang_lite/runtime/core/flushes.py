"""Callbacks that wake the readers of events: each is called once after a step, for all events of the step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from sglang_lite.runtime.core.inbox import Inbox

logger = logging.getLogger("sglang_lite")
E = TypeVar("E")


class Flushes:
    """Flush callbacks to call after the current step.

    Args:
        inbox: inbox of the loop that sends the events.
    """

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._flushes: dict[Callable[[], object], None] = {}  # ordered set

    def with_flush(self, sink: Callable[[E], object], flush: Callable[[], object] | None) -> Callable[[E], None]:
        """Sink that calls `flush` once after each step that has sent events to it; at once for events sent on other
        threads."""

        def send(event: E) -> None:
            sink(event)
            if flush is None:
                return
            if self._inbox.runs_here:
                self._flushes[flush] = None
            else:
                flush()

        return send

    def flush(self) -> None:
        """Calls the flush callbacks of this step. On the loop's thread."""
        flushes, self._flushes = self._flushes, {}
        for flush in flushes:
            try:
                flush()
            except Exception:  # raised by the caller's code: its event loop is closed, for example
                logger.exception("the reader of a step's events could not be woken")
