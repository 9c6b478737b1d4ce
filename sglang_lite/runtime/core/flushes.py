"""Callbacks that wake the readers of events. Each callback is called once after a step that has
sent its reader one or more events.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger("sglang_lite")
E = TypeVar("E")


class Flushes:
    """Flush callbacks to call after the current step. If events come from an engine's process, the
    callbacks are called after the current frame of messages instead.

    Args:
        runs_here: returns whether the calling thread is the one that sends the events and calls
            `flush`.
    """

    def __init__(self, runs_here: Callable[[], bool]) -> None:
        self._runs_here = runs_here
        self._flushes: dict[Callable[[], object], None] = {}  # ordered set

    def wrap_sink_with_flush(
        self, sink: Callable[[E], None], flush: Callable[[], object] | None
    ) -> Callable[[E], None]:
        """Returns a sink that calls `flush`, if given, once after each step that has sent it
        events. For an event that is sent on another thread, `flush` is called immediately.
        """
        if flush is None:
            return sink

        def send_and_flush(event: E) -> None:
            sink(event)
            if self._runs_here():
                self.flush_after_step(flush)
            else:
                flush()

        return send_and_flush

    def flush_after_step(self, flush: Callable[[], object]) -> None:
        """Schedules a callback to run after this step. Called on the thread that sends the events."""
        self._flushes[flush] = None

    def call_flush_callbacks(self) -> None:
        """Calls the flush callbacks of this step. Called on the thread that sends the events."""
        flushes = self._flushes
        self._flushes = {}
        for flush in flushes:
            try:
                flush()
            except Exception:  # raised by the caller's code: its event loop is closed, for example
                with contextlib.suppress(Exception):  # the caller's logging handlers may raise
                    logger.exception("the reader of an engine's events could not be woken")
