"""Sessions of an engine's clients. The client of a session is expected to send another request
after each answer.

To the scheduler, a session is an open program with one branch. The session's pages stay on the
device or move to the host, depending on when its next request is expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Final

from sglang_lite.program.play.branch import NOTHING_EXPECTED
from sglang_lite.protocol import Delta
from sglang_lite.runtime.core.inbox import Inbox
from sglang_lite.runtime.requests.output_builder import Event, Sink
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.requests.scheduled_branch import ScheduledBranch, ScheduledProgram
from sglang_lite.runtime.scheduler.pauses import Pauses

MAX_SESSIONS: Final = 4096  # beyond that, the least recently used one is closed
_KIND: Final = "\0session"  # name of the requests of all sessions; no node has this name


class _Turns:
    """State of a session's branch, which the scheduler reads. No nodes are ever queued, because the
    client itself sends a new request after the previous ones have ended.
    """

    expected = NOTHING_EXPECTED
    queue = ()
    paused = None
    error = None
    will_return = False

    def __init__(self) -> None:
        self.running = 0  # requests that have not ended

    @property
    def ask(self) -> object | None:
        return self if self.running else None


class EngineSessions:
    """Sessions by name. The methods can be called on any thread.

    Args:
        inbox: commands for the loop's thread.
        pauses: pauses of all programs.
    """

    def __init__(self, inbox: Inbox, pauses: Pauses) -> None:
        self._inbox = inbox
        self._pauses = pauses
        # The attributes below are used on the loop's thread only.
        self._open: dict[str, tuple[ScheduledBranch, _Turns]] = {}  # least recently used first

    def join_session(self, name: str | None, requests: Sequence[Request], priority: int) -> None:
        """Adds requests to a session before they are submitted. Does nothing if `name` is None. The
        first requests of a session open it.
        """
        if name is not None:
            self._inbox.post_if_open(partial(self._add_to_session, name, requests, priority))

    def drop_session(self, name: str) -> Future[None]:
        """Closes a session if it is open. Its pages are then cached like any others."""
        return self._inbox.post_for_result(partial(self._close_session, name))

    # ---------------------------------------------------------------------------- the loop's thread

    def _add_to_session(self, name: str, requests: Sequence[Request], priority: int) -> None:
        self._open[name] = branch, turns = (
            self._open.pop(name) if name in self._open else _make_session(priority)
        )
        if len(self._open) > MAX_SESSIONS:
            self._close_session(next(iter(self._open)))
        for request in requests:
            turns.running += 1
            request.branch, request.output.sink = (
                branch,
                partial(_count_end_and_send, turns, request.output.sink),
            )

    def _close_session(self, name: str) -> None:
        branch, _ = self._open.pop(name, (None, None))
        if branch is not None:
            branch.program.open = False
            self._pauses.end_branch(branch)


def _make_session(priority: int) -> tuple[ScheduledBranch, _Turns]:
    turns = _Turns()
    branch = ScheduledBranch(ScheduledProgram(priority), turns)
    branch.name = branch.kind = _KIND
    return branch, turns


def _count_end_and_send(turns: _Turns, sink: Sink, event: Event) -> None:
    if not isinstance(event, Delta):
        turns.running -= 1
    sink(event)
