"""Sinks that tests wait on."""

import threading

from sglang_lite.protocol import Delta, Played


class Collector:
    """A sink that knows when an event has come, and when `count` last events have."""

    def __init__(self, count=1):
        self.events, self.started = [], threading.Event()
        self.count, self._left, self._done = count, count, threading.Event()

    def __call__(self, event):
        self.events.append(event)
        self.started.set()
        if not isinstance(event, Delta | Played):
            self._left -= 1
            if not self._left:
                self._done.set()

    def ends(self):
        """The last events, when they have come."""
        assert self._done.wait(120), "the last event did not come"
        return [event for event in self.events if not isinstance(event, Delta | Played)]

    def end(self):
        (event,) = self.ends()
        return event

    def begun(self):
        """Waits for the first event."""
        assert self.started.wait(120), "no event came"
