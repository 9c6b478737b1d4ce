"""Room of a program among the open requests: it counts as one while a node of it needs an answer."""

from __future__ import annotations

from collections.abc import Callable

from sglang_lite.runtime.core.open_requests import OpenRequests


class ProgramRoom:
    """Room of one program. Used on the loop's thread.

    Args:
        open_requests: counter of open requests.
        acquired: whether the program is already counted.
        came: callback that tries again when there may be room; called on any thread.
    """

    def __init__(self, open_requests: OpenRequests, came: Callable[[], None], *, acquired: bool) -> None:
        self._open_requests, self._came = open_requests, came
        self._acquired, self._waits = acquired, False

    def acquire(self) -> bool:
        """Returns True if the program counts as an open request. If not, it queues for room."""
        if not self._acquired and not self._waits:
            self._acquired = self._open_requests.try_acquire()
            self._waits = not self._acquired
            if self._waits:
                self._open_requests.wait_for_room(self._came, 1, first=False)
        return self._acquired

    def try_again(self, *, wanted: bool) -> bool:
        """Tries to count the program, after a notice of room. Returns True if it counts. If the room is not `wanted`
        any more, gives it up: no other caller is notified before."""
        self._waits = False
        if not wanted:
            self._open_requests.leave(self._came)
            return False
        self._acquired = self._open_requests.try_acquire()
        if not self._acquired:
            self._waits = True
            self._open_requests.wait_for_room(self._came, 1, first=True)
        return self._acquired

    def release(self) -> None:
        """Stops counting the program."""
        if self._acquired:
            self._acquired = False
            self._open_requests.release()

    def end(self) -> None:
        """Gives up all room for good."""
        if self._waits:
            self._waits = False
            self._open_requests.leave(self._came)
        self.release()
        self._came = _nothing  # breaks a reference cycle, so that no garbage collection is needed


def _nothing() -> None:
    """Does nothing, when room is available for a program that has ended."""
