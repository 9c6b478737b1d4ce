"""Base class of players, the objects that execute branches. The modules that execute single
operations depend only on this class.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from sglang_lite.lang.concurrency.variables import TextLog
from sglang_lite.lang.execution.names import Names
from sglang_lite.lang.execution.operations import AnswerOp, Op, on_pool
from sglang_lite.lang.execution.push_down import PushedBranch
from sglang_lite.lang.execution.run import Run
from sglang_lite.lang.execution.transcript import Transcript
from sglang_lite.protocol import SglError

logger = logging.getLogger("sglang_lite")


class BasePlayer(ABC):
    """Executes the operations of a branch, and holds the results so far. The queue and the threads
    are in player.py.

    Args:
        run: run that the branch belongs to.
        pushed: pushed-down side of the branch, for a backend that executes whole programs; None if
            the backend is called node by node.
        log: text log of the branch, or None if the run is not streamed.

    Attributes:
        names: names of the branch's variables, shared with the submitting side.
        transcript: text of the branch; owned by the thread that executes it.
        played: finished, failed and rolled-back operations, in order; owned by the thread that
            executes the branch.
        scope_starts: index of the first piece of each open scope, by the id of its variable.
        failure_reported: whether the branch's failure is reported to the user, so that it need not
            be logged.
        sid: unique name of the branch, or "" until it is first requested.
        stopped: error that stopped the branch permanently (from outside the body, or by a
            rollback), or None.
    """

    __slots__ = (
        "_current", "_failure", "backend", "failure_reported", "log", "names", "played", "pushed", "run",
        "scope_starts", "sid", "stopped", "transcript",
    )  # fmt: skip

    def __init__(self, run: Run, pushed: PushedBranch | None, log: TextLog | None) -> None:
        self.run = run
        self.backend = run.backend
        self.pushed = pushed
        self.log = log
        self.names = Names()
        self.sid = ""
        self.transcript = Transcript(log)
        self.played: list[Op] = []
        self._current: Op | None = None
        self._failure: SglError | None = None
        self.failure_reported = False
        self.stopped: SglError | None = None
        self.scope_starts: dict[int, int] = {}

    @property
    def failure(self) -> SglError | None:
        """Error with which the branch failed or was permanently stopped, or None if neither has
        happened.
        """
        return self.names.gone or self._failure or self.stopped

    def may_answer_now(self, op: AnswerOp) -> bool:
        """Returns True if the backend may be asked now for an answer that needs no waiting.

        This requires that nobody reads the text as it grows, that the answer does not come from
        another call, and that the run is plain: no retries, deadline or budget, and no rerun. A
        backend that blocks may be asked only on its own threads.
        """
        on_its_threads = self.backend.answer_pool is None or on_pool.get() is self
        return (
            on_its_threads
            and self.transcript.log is None
            and self.run.plain
            and op.expression.source is None
        )

    def is_current(self, op: Op) -> bool:
        """Returns True if `op` is still the branch's current operation. Otherwise the branch was
        stopped, and the results of `op` must be discarded.
        """
        return self._current is op

    @abstractmethod
    def start_playing(self) -> None:
        """Starts a forked branch once its parent has executed the fork."""

    @abstractmethod
    def fail_branch(self, error: BaseException) -> object:
        """Fails the branch and all its queued operations."""

    def __del__(self) -> None:
        if getattr(self, "_failure", None) is not None and not self.failure_reported:
            logger.error("A program failed and its error was never read: %s", self._failure)
