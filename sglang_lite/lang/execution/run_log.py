"""Log of a run and of the programs inside it. With the log, a resumed run reaches the point where
the earlier run stopped, without asking models or calling tools again.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from hashlib import blake2b
from os import PathLike

from sglang_lite.lang.suspension import Suspension
from sglang_lite.protocol import ResumeError
from sglang_lite.protocol.run_log import (
    CallDecision,
    LoggedAnswer,
    LoggedCall,
    LoggedResult,
    LoggedTools,
    LoggedTurn,
    LogRecord,
    PendingCall,
)


def find_suspension(error: BaseException | None) -> Suspension | None:
    """Returns the suspension with which a body ended, or None if the body ended in another way.
    An exception group of a TaskGroup counts as one suspension if it contains nothing else.
    """
    if isinstance(error, Suspension) or not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, Suspension) else None
    found = [find_suspension(each) for each in error.exceptions]
    calls = [call for each in found if each is not None for call in each.calls]
    return None if None in found else Suspension(list(dict.fromkeys(calls)))


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """Options of `run` for its journal.

    Attributes:
        path: path of the file.
        secret: text that authenticates the lines of the file, or None.
    """

    path: str | PathLike[str]
    secret: str | None = None


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Call that is being made. Programs that its tool runs get paths below the call's path.

    Attributes:
        run: run that makes the call; only compared with other runs.
        key: path of the call in that run.
        inner: counter that numbers the programs run by the tool.
    """

    run: object
    key: str
    inner: Iterator[int] = field(default_factory=itertools.count)


# Call that is being made in this context.
current_call: ContextVar[CallPlace | None] = ContextVar("sglang_lite_call", default=None)


class RunLog:
    """Log of a run. Thread-safe.

    Args:
        identity: random text that identifies the run; "" to generate it.
        records: records of the run so far, if the run is resumed.
        write: stores a record; the second argument says whether to wait until it is on the disk.
            None to keep the log only in memory.
        close: releases the file.
        journal: options of the file, or None.

    Attributes:
        identity: text from which the idempotency keys of calls are derived.
        records: all records, in order.
        replays: whether the log has records of an earlier run.
        journal: the argument.
        close: releases the log's file. Later records are not stored.
        answers: answers, by run and node.
        tools: tools of each tool loop, by run and loop.
        calls: calls that were begun, by run and call.
        results: results of calls, by run and call.
        turns: turns with results, by run and turn.
        decisions: decisions that were not used yet, by run and call.
        open_loops: tool loops that are running in coroutines, and the call in which each one runs.
    """

    def __init__(
        self,
        identity: str = "",
        records: Iterable[LogRecord] = (),
        write: Callable[[LogRecord, bool], None] | None = None,
        close: Callable[[], object] = lambda: None,
        journal: JournalOptions | None = None,
    ) -> None:
        self.identity = identity or uuid.uuid4().hex
        self.records: list[LogRecord] = []
        self.journal = journal
        self.close = close
        self.answers: dict[tuple[str, str], LoggedAnswer] = {}
        self.tools: dict[tuple[str, str], LoggedTools] = {}
        self.calls: dict[tuple[str, str], LoggedCall] = {}
        self.results: dict[tuple[str, str], LoggedResult] = {}
        self.turns: dict[tuple[str, str], LoggedTurn] = {}
        self.decisions: dict[tuple[str, str], CallDecision] = {}
        self.open_loops: dict[asyncio.Future[None], CallPlace | None] = {}
        self._lock = threading.Lock()
        self._write = write
        for record in records:
            self._index(record)
        self.replays = bool(self.records)
        self._unreached = set(self.calls)

    def add(self, record: LogRecord, *, durable: bool = False) -> None:
        """Adds a record.

        Args:
            durable: whether to wait until it is on the disk.

        Raises:
            ParameterError: the record can't be written.
        """
        with self._lock:
            if self._write is not None:
                self._write(record, durable)
            self._index(record)

    def _index(self, record: LogRecord) -> None:
        self.records.append(record)
        match record:
            case LoggedAnswer():
                self.answers[record.run, record.node] = record
            case LoggedTools():
                self.tools[record.run, record.loop] = record
            case LoggedCall():
                self.calls[record.run, record.call] = record
                self.decisions.pop((record.run, record.call), None)  # the decision was used
            case LoggedResult():
                self.results[record.run, record.call] = record
            case LoggedTurn():
                self.turns[record.run, record.turn] = record
            case CallDecision(verdict="withdraw"):
                self.decisions.pop((record.run, record.call), None)
            case CallDecision():
                self.decisions[record.run, record.call] = record

    def key_of(self, run: str, call: str) -> str:
        """Returns the idempotency key of a call. It is the same each time the call is made, and
        differs from the keys of all other calls.
        """
        text = "\n".join((self.identity, run, call))
        return blake2b(text.encode(), digest_size=16).hexdigest()

    def calls_in_doubt(self, run: str) -> list[PendingCall]:
        """Returns the calls of a run and the runs inside it that were begun and have no result."""
        return [
            PendingCall(call.tool, call.arguments, True, call.call, call.run)
            for place, call in self.calls.items()
            if place not in self.results
            and place not in self.decisions
            and call.run.startswith(run)
        ]

    def reach(self, run: str, call: str) -> None:
        """Records that a resumed run has reached a call."""
        self._unreached.discard((run, call))

    def check_reached(self, run: str) -> None:
        """Raises ResumeError if a body has ended without reaching one of the logged calls."""
        missed = [self.calls[place] for place in self._unreached if place[0] == run]
        if missed:
            first = min(missed, key=lambda call: call.call)
            raise difference_error(
                f"it has the call {first.tool}({first.arguments})", "ended without it"
            )


def difference_error(logged: str, now: str, why: str = "") -> ResumeError:
    return ResumeError(
        f"the run differs from its log. In the log, {logged}; the body now {now}.{why}",
        hint="Give what changes, such as the time, as an argument, or begin a new run.",
    )
