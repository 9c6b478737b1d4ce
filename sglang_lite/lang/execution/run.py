"""State shared by the branches of a run: backend, settings, deadline, usage, and the program pushed
down to the backend.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import Context, ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from sglang_lite.lang.backend.base import Backend, name_of
from sglang_lite.lang.backend.planning import Planner, RunFacts
from sglang_lite.lang.concurrency.loop import fork_count
from sglang_lite.lang.concurrency.variables import TextLog, Variable
from sglang_lite.lang.execution.budget import Budget, NodeAccount
from sglang_lite.lang.execution.push_down import PushedBranch, PushedProgram
from sglang_lite.lang.execution.run_log import RunLog, current_call
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.results import collect_usages
from sglang_lite.program.seeds import derive_seed
from sglang_lite.protocol import (
    UNSET,
    BudgetError,
    CapabilityError,
    Generation,
    RequestTimeoutError,
    SamplingParams,
    SglError,
    TemplateError,
    TraceNode,
    Unset,
    Usage,
    total_usage,
)
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.sampling import NO_PARAMS
from sglang_lite.text.chat_template import TurnTemplate

if TYPE_CHECKING:
    from sglang_lite.lang.execution.control_text import SpelledTokens
    from sglang_lite.lang.execution.kept import Kept
    from sglang_lite.lang.tool_events import ToolEvent
    from sglang_lite.protocol.run_log import PendingCall
    from sglang_lite.protocol.saved import SavedRun

_NO_CONTEXT = Context()


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a whole run.

    Attributes:
        params: sampling parameters that nodes inherit.
        stream: whether the text may be read while it grows.
        seed: seed from which each node's seed is derived, or None for random seeds.
        timeout: seconds for the whole run, or None for no limit.
        wind_down: seconds after the timeout in which generations end where their text may be cut;
            None if the timeout ends the run.
        retries: number of further attempts after a node's backend has failed.
        push_down: whether to push the run down as one program, if the backend plays programs.
        priority: priority of that program at its engine.
        budget: limits on the run's usage, which runs may share. The backend is then called node by
            node. None for no limits.
        use_thread: whether `run` returns before everything has been executed.
        shortened: what happens to answers that a limit cuts: "raise", "warn" or "keep"; None for
            the default of the generation.
    """

    params: SamplingParams = NO_PARAMS
    stream: bool = False
    seed: int | None = None
    timeout: float | None = None
    wind_down: float | None = None
    retries: int = 0
    push_down: bool = True
    priority: int = 0
    budget: Budget | None = None
    use_thread: bool = True
    shortened: str | None = None


class RunUsage:
    """Account of a run's usage, starting when the object is created.

    Attributes:
        started: `time.perf_counter()` when the run began.
    """

    __slots__ = ("_last_end", "_others", "_records", "started")

    def __init__(self) -> None:
        self._records: list[Any] = []
        # usage of attempts that failed, and of scores that were read
        self._others: tuple[Usage, ...] = ()
        self.started = self._last_end = time.perf_counter()

    def record_result(self, record: object) -> float:
        """Records the result of a node and returns the current `time.perf_counter()`."""
        self._records.append(record)
        self._last_end = now = time.perf_counter()
        return now

    def record_failures(self, usages: Iterable[Usage | None]) -> None:
        """Records the usage of failed attempts. The tokens that they generated count as thrown
        away.
        """
        for usage in usages:
            if usage is not None:
                self._others += (
                    msgspec.structs.replace(usage, thrown_away_tokens=usage.completion_tokens),
                )

    def record_scoring(self, usage: Usage) -> None:
        """Records the usage of scoring texts. It adds nothing to the run's time, and may be
        recorded after the run has ended.
        """
        self._others += (usage,)

    def add_earlier_usage(self, usage: Usage) -> None:
        """Adds the usage of an earlier run, including its time."""
        self.record_result(Generation("", usage=usage))
        self.started = self._last_end - usage.total_s

    def usage(self) -> Usage:
        """Returns the usage of all nodes, including failed attempts and scoring. `total_s` is the
        time from the run's start to its last result.
        """
        total = total_usage([*collect_usages(self._records[:]), *self._others])
        return msgspec.structs.replace(total, total_s=self._last_end - self.started)


class BoundCall(msgspec.Struct, frozen=True, eq=False):
    """Program, together with the arguments for its body."""

    program: BaseProgram
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class Inner(Protocol):
    """Program, or batch of programs, that a body runs."""

    def stop(self, error: SglError) -> object:
        """Ends the run with an error if it has not ended yet. Thread-safe."""


class Run:
    """State shared by the branches of a run.

    Attributes:
        backend, settings: backend and settings of the run.
        deadline: `time.monotonic()` at which this run, or an enclosing run, times out; None for
            never.
        timeout: timeout in seconds that the deadline comes from.
        winds_down_at: `time.monotonic()` after which generations end where their text may be cut;
            None for never.
        called: program being run, with its arguments; None if no program is run.
        remembered: answers of the earlier run that this run continues.
        spelled: control tokens that the arguments spell, or None.
        unbound: saved run that this run continues, if it was loaded without its program; else None.
        kept: answers of the earlier run that this run repeats; None if it is not a rerun.
        body_open: True while the body is running, so that names may yet be declared.
        is_async: True if the body is a coroutine; no read may block its event loop.
        body_end: variable that is set when the body has ended; None if the run is not streamed.
        body: task of a streaming coroutine body, kept here because the event loop holds tasks only
            weakly.
        level: number of the enclosing runs.
        loop: event loop of a coroutine body, if that is the caller's loop.
        outer: enclosing run; None if there is none, or the run has a log of its own.
        is_item: whether the run is an item of a batch; each item has its own log.
        is_logged: whether the run's answers are added to the log.
        path: path of the run within the outermost run; "" for the outermost run itself.
        pending: calls that wait for a decision; empty if the body was not suspended.
        made: `fork_count()` when the run began.
        new_state: makes the state through which a body sees a branch.
        later_programs: programs that the body's branches pushed down after the first one.
        plain: True if the run has no retries, deadline or budget, and is not a rerun.
        budgets: budgets of this run and of the enclosing runs.
        state: returns the main branch's state, for budget errors; None if there is no body or no
            budget.
        account: usage of the nodes, and elapsed time.
        push_down: True if this run and the enclosing runs may be pushed down.
        context: context variables of the run's caller; operations are played in copies of it.
    """

    __slots__ = (
        "__weakref__", "_events", "_inner_runs", "_inside", "_log", "_seeds", "_stopped", "_template", "account",
        "backend", "body", "body_end", "body_open", "budgets", "called", "context", "deadline", "is_async", "is_item",
        "is_logged", "kept", "later_programs", "level", "loop", "made", "new_state", "outer", "path", "pending",
        "plain", "push_down", "remembered", "settings", "spelled", "state", "timeout", "unbound", "winds_down_at",
    )  # fmt: skip

    def __init__(
        self,
        backend: Backend,
        settings: RunSettings,
        *,
        is_async: bool = False,
        new_state: Callable[[Any], UserValue],  # takes a Branch, whose module imports this one
        outer: Run | None = None,
        kept: Kept | None = None,
        log: RunLog | None = None,
        path: str = "",
        is_item: bool = False,
    ) -> None:
        self.backend = backend
        self.settings = settings
        self.is_async = is_async
        self.new_state = new_state
        self.level: int = 0 if outer is None else outer.level + 1
        self.deadline: float | None = None
        self.timeout: float | None = None
        now = time.monotonic()
        self.winds_down_at: float | None = None
        self.budgets: tuple[Budget, ...] = ()
        if settings.timeout is not None or outer is not None:
            self.deadline, self.timeout = compute_run_deadline(settings, outer, now)
        if settings.budget is not None or outer is not None:
            self.budgets = (
                *(() if settings.budget is None else (settings.budget,)),
                *(outer.budgets if outer else ()),
            )
            for budget in self.budgets:
                budget.check_price_known(backend)
        self.outer = None if log is not None else outer
        self.is_item = is_item
        self.path = path
        self.pending: tuple[PendingCall, ...] = ()
        self._log = log
        self._inner_runs = 0  # how many programs the body has run
        self.is_logged = log is not None
        if outer is not None and path:
            self.is_logged = outer.is_logged
        self.kept = kept
        self.plain = (
            self.deadline is None and not settings.retries and not self.budgets and kept is None
        )
        self.push_down: bool = (
            settings.push_down and not self.budgets and (outer is None or outer.push_down)
        )
        if self.deadline is not None:
            self.winds_down_at = self._find_wind_down_time(outer, now)
        self.body_open = True
        self.made = fork_count()
        self.body: Any = None
        self.body_end = Variable(made=self.made) if settings.stream else None
        # events of agents, as metadata of empty pieces
        self._events = TextLog() if settings.stream else None
        self.called: BoundCall | None = None
        self.remembered: tuple[TraceNode, ...] = ()
        self.unbound: SavedRun | None = None
        self.spelled: SpelledTokens | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.context = _NO_CONTEXT
        self._template: TurnTemplate | None = None
        self.state: Callable[[], Any] | None = None
        self._seeds = itertools.count(1)
        self._inside: set[weakref.ref[Inner]] = set()
        self._stopped: SglError | None = None  # set if the run was stopped for good
        self.account = RunUsage()
        self.later_programs: list[PushedProgram] = []

    def new_pushed_branch(self) -> PushedBranch | None:
        """Creates the main branch of a program to push down. Returns None if the backend is called
        node by node.

        Raises:
            CapabilityError: a priority is set and the run can't be pushed down to a backend that
                accepts one.
        """
        settings = self.settings
        backend = self.backend
        accepts = settings.push_down and backend.plays_programs and backend.capabilities.priority
        if settings.priority and not accepts:
            raise CapabilityError(
                f"{name_of(backend)} accepts no priority for this run.",
                hint="Leave priority out, or run the whole program on an engine or a server of this package.",
                parameter="priority",
            )
        if not self.push_down or not backend.plays_programs:
            return None
        return PushedBranch(PushedProgram(self))

    def _find_wind_down_time(self, outer: Run | None, now: float) -> float | None:
        """Returns the time (`time.monotonic()`) at which the run starts to wind down, or None for
        never. The run begins at `now`. If the enclosing run winds down earlier, that time is
        returned.

        Raises:
            CapabilityError: the backend can't end answers that are still being generated.
        """
        found = None if outer is None else outer.winds_down_at
        if self.settings.wind_down is None:
            return found
        backend = self.backend
        can = self.backend.capabilities
        whole = can.winds_down_programs and self.push_down and backend.plays_programs
        if not (can.winds_down or whole):
            node_by_node = " of a run that is asked node by node" if can.winds_down_programs else ""
            raise CapabilityError(
                f"{name_of(backend)} can't end an answer{node_by_node} that is open, so it can't honour wind_down.",
                hint="Leave it out: the timeout then ends the run with what is finished, in the error's state. "
                + (
                    "Or leave out push_down and limits on usage."
                    if node_by_node
                    else "Or run on an engine."
                ),
                parameter="wind_down",
            )
        assert self.settings.timeout is not None, "as `check_wind_down` has found"
        own = now + self.settings.timeout
        return own if found is None else min(own, found)

    @property
    def log(self) -> RunLog | None:
        """Log of the outermost run, or None if it is not logged."""
        if self.outer is None or self.is_item:
            return self._log
        return self.outer.log

    def attach_log(self, log: RunLog) -> None:
        """Sets the log, which comes from the earlier run whose state this run continues."""
        self._log = log

    def ensure_log(self) -> RunLog:
        """Returns the log of the outermost run, and creates the log if there is none."""
        self.is_logged = True
        if self.outer is not None and not self.is_item:
            return self.outer.ensure_log()
        if self._log is None:
            self._log = RunLog()
        return self._log

    def next_inner_path(self) -> str:
        """Returns the path of the next program that this run's body, or the current tool, runs."""
        call = current_call.get()
        if call is not None and call.run is self:
            return f"{self.path}{call.key}>{next(call.inner)}>"
        self._inner_runs += 1
        return f"{self.path}{self._inner_runs}>"

    @property
    def winds_down(self) -> bool:
        """True once the run winds down: generations then end at the next place where their text may
        be cut.
        """
        return self.winds_down_at is not None and time.monotonic() >= self.winds_down_at

    def seconds_until(self, share: float) -> float | None:
        """Returns the seconds until a share (0 to 1) of the run's time has passed, or None if the
        run has no timeout. Negative if it has passed.
        """
        if self.deadline is None or self.timeout is None:
            return None
        return self.deadline - (1 - share) * self.timeout - time.monotonic()

    def is_nearly_spent(self, share: float) -> bool:
        """Returns True if a share (0 to 1) of the run's time, or of one of its budgets, is used."""
        left = self.seconds_until(share)
        return (left is not None and left <= 0) or any(
            budget.is_nearly_spent(share) for budget in self.budgets
        )

    def has_room_for(self, usage: Usage) -> bool:
        """Returns True if a call with this usage would stay within the run's budgets now."""
        return all(budget.has_room_for(self.backend, usage) for budget in self.budgets)

    def planner_for_backend(self, backend: Backend) -> Planner | None:
        """Returns the planner that combines or orders the calls of the main branch to a backend.
        Returns None if every node is called separately.
        """
        drafts = None if self.called is None else self.called.program.api_drafts
        shares = self.settings.seed is None and not self.budgets
        return backend.planner(RunFacts.for_new_run(self.settings.params, drafts, shares=shares))

    @property
    def template(self) -> TurnTemplate:
        """Chat template of the backend's model. Raises TemplateError if the model has none."""
        if self._template is None:
            self._template = self.backend.get_chat_template()
            if self._template is None:
                raise TemplateError(
                    "the model has no chat template, so roles have no text.",
                    hint=f"Write the prompt as plain text, or {self.backend.template_cure}",
                )
        return self._template

    @contextlib.contextmanager
    def reserve_in_budgets(
        self, backend: Backend, max_usage: Callable[[], Usage]
    ) -> Iterator[NodeAccount | None]:
        """Reserves a call in all budgets; the call is made in the `with` block. Yields its account,
        or None without budgets.

        Args:
            max_usage: computes the maximum usage of the call.

        Raises:
            BudgetError: the call could exceed a limit.
        """
        if not self.budgets:
            yield None
            return
        account = NodeAccount(backend, max_usage())
        with contextlib.ExitStack() as reservations:
            try:
                for budget in self.budgets:
                    reservations.enter_context(budget.reserve(account))
            except BudgetError as error:
                error.state = None if self.state is None else self.state()
                raise
            with account.track_call():
                yield account

    def record_event(self, event: ToolEvent) -> None:
        """Records an event of an agent."""
        if self._events is None:  # the body's thread is the only one, as it is not streamed
            self._events = TextLog()
        self._events.append("", {"event": event})

    def end_events(self) -> None:
        """Ends the event stream of a streamed run. Called when the body has ended."""
        if self._events is not None:
            self._events.close()

    def events_so_far(self) -> list[ToolEvent]:
        """Returns the events that were recorded so far."""
        pieces = [] if self._events is None else self._events.pieces_so_far()
        return [meta["event"] for _, meta in pieces if meta is not None]

    def follow_events(self) -> Iterator[ToolEvent]:
        """Yields the events of a streamed run, as they come, until the body ends."""
        assert self._events is not None
        for _, meta in self._events:
            if meta is not None:
                yield meta["event"]

    async def afollow_events(self) -> AsyncIterator[ToolEvent]:
        """Yields the same as `follow_events`, asynchronously."""
        assert self._events is not None
        async for _, meta in self._events:
            if meta is not None:
                yield meta["event"]

    def seed_for_path(self, path: str) -> int | Unset:
        """Returns the seed of the node at a path of the program's tree."""
        seed = self.settings.seed
        return UNSET if seed is None else derive_seed(seed, path)

    def next_inner_run_seed(self) -> int | None:
        """Returns the seed for the next program that the body runs separately, or None if this run
        has no seed.
        """
        seed = self.settings.seed
        return None if seed is None else derive_seed(seed, f"inside/{next(self._seeds)}")

    def register_inner(self, inner: Inner) -> None:
        """Registers an inner run to be stopped together with this run."""
        self._inside.add(weakref.ref(inner, self._inside.discard))
        if self._stopped is not None:
            inner.stop(self._stopped)

    def stop_inner_runs(self, error: SglError, *, final: bool) -> None:
        """Stops the inner runs.

        Args:
            final: whether to stop inner runs that begin later, too.
        """
        if final:
            self._stopped = self._stopped or error
        for ref in list(self._inside):
            inner = ref()
            if inner is not None:
                inner.stop(error)


def compute_run_deadline(
    settings: RunSettings, outer: Run | None, now: float
) -> tuple[float | None, float | None]:
    """Returns the deadline (`time.monotonic()`) and the timeout in seconds of a run that begins at
    `now`. Both are None if no timeout is set. If the enclosing run has an earlier deadline, returns
    that run's values. The deadline includes the time for winding down.
    """
    timeout = settings.timeout
    deadline = None if timeout is None else now + timeout + (settings.wind_down or 0.0)
    if outer is not None and outer.deadline is not None and outer.deadline < (deadline or math.inf):
        return outer.deadline, outer.timeout
    return deadline, timeout


def run_timeout_error(timeout: float | None) -> RequestTimeoutError:
    """Returns the error for a run whose deadline has passed."""
    return RequestTimeoutError(f"the run took longer than its timeout of {timeout:g} s.")


# Run whose body is executing in this context.
current_run: ContextVar[Run | None] = ContextVar("sglang_lite_run", default=None)
