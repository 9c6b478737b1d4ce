"""State shared by the branches of a run: its backend, settings, deadline, and the program that it hands over."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import Context, ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.concurrency.loop import forks
from sglang_lite.lang.execution.budget import Budget
from sglang_lite.lang.execution.push_down import PushedBranch, PushedProgram
from sglang_lite.lang.execution.run_usage import RunUsage
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.program.seeds import derived_seed
from sglang_lite.protocol import (
    UNSET,
    BudgetError,
    CapabilityError,
    RequestTimeoutError,
    SamplingParams,
    SglError,
    TemplateError,
    Usage,
)
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.saved import SavedAnswer
from sglang_lite.text.chat_template import TurnTemplate

if TYPE_CHECKING:
    from sglang_lite.lang.execution.api_speculation import ApiSpeculation
    from sglang_lite.lang.execution.branch import Branch

NO_PARAMS = SamplingParams()
_NO_CONTEXT = Context()


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings of a whole run.

    Attributes:
        params: sampling parameters that nodes inherit.
        stream: somebody may read the text while it grows.
        seed: from which each node's seed is made.
        timeout: seconds for the whole run, None for no limit.
        retries: how often a node whose backend failed is tried again.
        push_down: hand the run over as one program, where the backend plays programs.
        priority: of that program at its engine.
        budget: limits on what it may use; runs may share one. It is asked node by node then.
        use_thread: `run` returns before everything has been executed.
    """

    params: SamplingParams = NO_PARAMS
    stream: bool = False
    seed: int | None = None
    timeout: float | None = None
    retries: int = 0
    push_down: bool = True
    priority: int = 0
    budget: Budget | None = None
    use_thread: bool = True

    def check_priority(self, backend: BaseBackend) -> None:
        """Raises CapabilityError: a priority, which only who is handed the run as a program may take."""
        if self.priority and not (self.push_down and backend.plays_programs and backend.takes_priority):
            raise CapabilityError(
                f"{type(backend).__name__} accepts no priority for this run.",
                hint="Leave priority out, or run the whole program on an engine or a server of this package.",
                parameter="priority",
            )


class Calling(msgspec.Struct, frozen=True, eq=False):
    """A program and the arguments of its body."""

    program: BaseProgram
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class Inner(Protocol):
    """Something that a body runs by itself: a program, or a batch of them."""

    def stop(self, error: SglError) -> object:
        """Ends it with an error, unless it has ended. Any thread may call it."""


class Run:
    """State shared by the branches of a run.

    Attributes:
        backend, settings: as given.
        deadline: `time.monotonic()` at which the run, or one that it is inside, has taken too long; None for never.
        timeout: the seconds that the deadline stands for.
        called: the program that is run; None where there is none.
        speculation: of its program, where that may speculate on the calls of an API.
        speculates: it does in this run.
        remembered: answers of an earlier run, which this one continues.
        body_open: the body is still running, so that names may yet be declared.
        is_async: the body is a coroutine, whose event loop no read may block.
        body: the task of a streaming coroutine body, which nobody else may hold.
        loop: the event loop that a coroutine body runs on, where that is the caller's.
        made: `forks()` when it began.
        new_state: makes what a body holds of a branch; None: the run has no body.
        plain: neither retries, a timeout nor a budget are to be watched.
        budgets: its own, and those of the runs that it is inside.
        state: what the body holds of the first branch, for errors of budgets; None: there is no body, or no budget.
        account: what its nodes have used, and how long it has taken.
        push_down: as set, for this run and those that it is inside.
        context: of whoever has run it: what is played elsewhere is played in copies of it.
    """

    __slots__ = (
        "__weakref__", "_inside", "_seeds", "_stopped", "_template", "account", "backend", "body", "body_open",
        "budgets", "called", "context", "deadline", "is_async", "loop", "made", "new_state", "plain", "push_down",
        "remembered", "settings", "speculates", "speculation", "state", "timeout",
    )  # fmt: skip

    def __init__(
        self,
        backend: BaseBackend,
        settings: RunSettings,
        *,
        is_async: bool = False,
        outer: Run | None = None,
        new_state: Callable[[Branch], UserValue] | None = None,
    ) -> None:
        self.backend, self.settings, self.is_async, self.new_state = backend, settings, is_async, new_state
        self.deadline: float | None = None
        self.timeout: float | None = None
        self.budgets: tuple[Budget, ...] = ()
        if settings.timeout is not None or outer is not None:
            self.deadline, self.timeout = deadline_of(settings.timeout, outer)
        if settings.budget is not None or outer is not None:
            self.budgets = (*(() if settings.budget is None else (settings.budget,)), *(outer.budgets if outer else ()))
            for budget in self.budgets:
                budget.check(backend)
        self.plain = self.deadline is None and not settings.retries and not self.budgets
        self.push_down: bool = settings.push_down and not self.budgets and (outer is None or outer.push_down)
        self.body_open, self.made = True, forks()
        self.body: Any = None
        self.called: Calling | None = None
        self.speculation: ApiSpeculation | None = None
        self.speculates = False
        self.remembered: tuple[SavedAnswer, ...] = ()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.context = _NO_CONTEXT
        self._template: TurnTemplate | None = None
        self.state: Callable[[], Any] = _no_state
        self._seeds = itertools.count(1)
        self._inside: set[weakref.ref[Inner]] = set()
        self._stopped: SglError | None = None  # for good
        self.account = RunUsage()

    def pushed(self) -> PushedBranch | None:
        """Hands the run over; None where the backend is asked node by node.

        Raises:
            CapabilityError: a priority, which nobody takes.
        """
        self.settings.check_priority(self.backend)
        if not self.push_down or not self.backend.plays_programs:
            return None
        settings = self.settings
        return PushedBranch(PushedProgram(self.backend, stream=settings.stream, priority=settings.priority))

    @property
    def template(self) -> TurnTemplate:
        """The chat template: how roles become text. Raises TemplateError: the model has none."""
        if self._template is None:
            self._template = self.backend.get_chat_template()
            if self._template is None:
                raise TemplateError(
                    "the model has no chat template, so roles have no text.",
                    hint="Write the prompt as plain text, or set `backend.chat_template` to one of "
                    "sglang_lite.lang.chat_template.",
                )
        return self._template

    @contextlib.contextmanager
    def within_budget(self, backend: BaseBackend, most: Callable[[], Usage]) -> Iterator[list[Usage]]:
        """Books a call with all budgets, which is made inside; as `Budget.call`."""
        if not self.budgets:
            yield []
            return
        needed = most()
        with contextlib.ExitStack() as booked:
            try:
                used = [booked.enter_context(budget.call(backend, needed)) for budget in self.budgets]
            except BudgetError as error:
                error.state = self.state()
                raise
            told: list[Usage] = []
            yield told
            for each in used:
                each += told

    def inner_seed(self) -> int | None:
        """A seed for the next program that the body runs by itself."""
        seed = self.settings.seed
        return None if seed is None else derived_seed(seed, f"inside/{next(self._seeds)}")

    def contain(self, inner: Inner) -> None:
        """Has something that the body runs by itself stopped with this run."""
        self._inside.add(weakref.ref(inner, self._inside.discard))
        if self._stopped is not None:
            inner.stop(self._stopped)

    def stop_inside(self, error: SglError, *, final: bool) -> None:
        """Stops what the body runs by itself.

        Args:
            final: and whatever it will run.
        """
        if final:
            self._stopped = self._stopped or error
        for ref in list(self._inside):
            inner = ref()
            if inner is not None:
                inner.stop(error)

    def hand_over(
        self, name: str, call: Callable[..., UserValue], args: Sequence[UserValue], kwargs: Mapping[str, UserValue]
    ) -> UserValue:
        """Has the run of a body that is only recorded call something when it is there. None: this is no such run."""
        return None


def _no_state() -> None:
    """Stands for a state that nobody holds."""


def deadline_of(timeout: float | None, outer: Run | None) -> tuple[float | None, float | None]:
    """Deadline of a run that begins now (`time.monotonic()`), and the seconds that it stands for: its own timeout, or
    that of the run which it is inside. None: it has none."""
    deadline = None if timeout is None else time.monotonic() + timeout
    if outer is not None and outer.deadline is not None and outer.deadline < (deadline or math.inf):
        return outer.deadline, outer.timeout
    return deadline, timeout


def too_long(timeout: float | None) -> RequestTimeoutError:
    """The error of a run whose time is over."""
    return RequestTimeoutError(f"the run took longer than its timeout of {timeout:g} s.")


current_run: ContextVar[Run | None] = ContextVar("sglang_lite_run", default=None)  # whose body is running here


def merge(outer: SamplingParams, inner: SamplingParams) -> SamplingParams:
    """`outer`, with everything that `inner` sets."""
    if outer is NO_PARAMS or inner is NO_PARAMS:
        return inner if outer is NO_PARAMS else outer
    try:
        return _merged(outer, inner)
    except TypeError:  # a value that is only known when the program runs has no hash
        return _merged.__wrapped__(outer, inner)


@lru_cache(maxsize=4096)
def _merged(outer: SamplingParams, inner: SamplingParams) -> SamplingParams:
    given = {name: value for name in inner.__struct_fields__ if (value := getattr(inner, name)) is not UNSET}
    return msgspec.structs.replace(outer, **given)
