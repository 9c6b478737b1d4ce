"""Work of the loop's thread that can wait until the device computes, or until another command comes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import count

logger = logging.getLogger("sglang_lite")

_SHARE = 4  # a step does at least one in this many of the calls that wait, so that none waits for long


class Postponed:
    """Calls that wait, in order. Each runs once."""

    def __init__(self) -> None:
        self._calls: dict[int, Callable[[], object]] = {}
        self._numbers = count()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def add(self, call: Callable[[], object]) -> Callable[[], None]:
        """Queues a call. Returns a function that runs it at once if it has not run yet."""
        number = next(self._numbers)
        self._calls[number] = call
        return partial(self._run, number)

    def run(self, goes_on: Callable[[], bool]) -> None:
        """Runs the first calls: a share of all, and further ones while `goes_on` returns True."""
        due = -(-len(self._calls) // _SHARE)
        while self._calls and (due > 0 or goes_on()):
            due -= 1
            self._run(next(iter(self._calls)))

    def run_all(self) -> None:
        """Runs all calls, also those that are added meanwhile."""
        while self._calls:
            self._run(next(iter(self._calls)))

    def close(self) -> None:
        """Runs all calls, and logs their exceptions, as the loop ends."""
        while self._calls:
            try:
                self.run_all()
            except Exception:  # may have ended the loop; the other callers must still be notified
                logger.exception("what a step has led to could not be told")

    def _run(self, number: int) -> None:
        call = self._calls.pop(number, None)
        if call is not None:
            call()
