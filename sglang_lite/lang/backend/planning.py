"""Interface of planners, and the facts about a run that they use. Planners serve backends that are
called for one generation at a time. A plan may get several answers from one call, or make one
generation wait for another.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from sglang_lite.lang.backend.base import Backend, collect_single_answer
from sglang_lite.program.nodes import Expression
from sglang_lite.protocol import (
    Constraint,
    Delta,
    Generation,
    Location,
    Prompt,
    SamplingParams,
    Selection,
)
from sglang_lite.protocol.sampling import NO_PARAMS

# True while a selection needs the scores of its choices.
scores_needed: ContextVar[bool] = ContextVar("sglang_lite_scores_needed", default=False)

# Drafts end below this rate of hits, after at least this number of generations.
_MIN_SEEN = 32
_MIN_RATE = 0.5


@dataclass(slots=True, eq=False)
class ApiDrafts:
    """Decides whether a program's API calls also request drafts of later generations in the same
    turn. Counts, over all runs of the program, how many drafts were used.

    Args:
        tokens: maximum number of tokens that a call may generate ahead, or None for no drafts.

    Attributes:
        found: number of generations whose text an earlier call had already drafted.
        missed: number of generations that an earlier call could have drafted, but that needed a
            call.
        saved_tokens: number of prompt tokens that were not sent again.
        thrown_tokens: number of generated tokens that were not used.
    """

    tokens: int | None
    found: int = field(default=0, init=False)
    missed: int = field(default=0, init=False)
    saved_tokens: int = field(default=0, init=False)
    thrown_tokens: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    @property
    def enabled(self) -> bool:
        """True if the next run will request drafts. Becomes False if, after at least 32
        generations, fewer than half had been drafted.
        """
        seen = self.found + self.missed
        return self.tokens is not None and (seen < _MIN_SEEN or self.found >= seen * _MIN_RATE)

    def note(self, found: int, missed: int, saved: int, thrown: int) -> None:
        """Adds the results of a call to the counts."""
        with self._lock:
            self.found += found
            self.missed += missed
            self.saved_tokens += saved
            self.thrown_tokens += thrown


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run, used to plan its calls.

    Attributes:
        params: sampling parameters of the run.
        drafts: drafts of the program, or None if it has none.
        drafting: True if calls of this run draft.
        shares: True if equal branches may share a call: the run has no seed and no budget.
    """

    params: SamplingParams
    drafts: ApiDrafts | None = None
    drafting: bool = False
    shares: bool = True

    @classmethod
    def for_new_run(
        cls, params: SamplingParams, drafts: ApiDrafts | None, *, shares: bool = True
    ) -> RunFacts:
        """Collects the facts of a run that begins now. Its program may have drafts."""
        if drafts is None or drafts.tokens is None:
            return cls(params, shares=shares)
        return cls(params, drafts, drafts.enabled, shares)


@dataclass(frozen=True, slots=True)
class NodeQuestion:
    """Request of a node to a backend, with the arguments of `Backend.agenerate`."""

    backend: Backend
    prompt: Prompt
    params: SamplingParams = NO_PARAMS
    constraint: Constraint | None = None
    stream: bool = False

    def request_events(self) -> AsyncGenerator[Delta | Generation, None]:
        """Requests the generation and yields its events."""
        return self.backend.agenerate(self.prompt, self.params, self.constraint, stream=self.stream)

    async def request_single_sample(
        self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None = None
    ) -> Generation:
        """Sends another request to the same backend and returns the single sample."""
        return await collect_single_answer(
            self.backend.agenerate(prompt, params, constraint, stream=False)
        )

    async def request_selection(self, choices: Sequence[str]) -> Selection:
        """Requests a selection."""
        return await self.backend.aselect(self.prompt, choices, unconditional=False)


class AnswerSource(ABC):
    """Source of a node's answer. It is asked in place of the backend, on the executor loop."""

    @asynccontextmanager
    async def guard_attempts(self, text: str) -> AsyncIterator[None]:
        """Opens a context around all attempts at the node. The time until it is entered does not
        count toward the node's timeout.

        Args:
            text: text of the branch before the node.
        """
        yield

    @abstractmethod
    def agenerate(self, question: NodeQuestion) -> AsyncGenerator[Delta | Generation, None]:
        """Yields the events of the generation, like `NodeQuestion.request_events`."""

    async def aselect(self, question: NodeQuestion, choices: Sequence[str]) -> Selection:
        """Returns the answer of the selection, like `NodeQuestion.request_selection`."""
        return await question.request_selection(choices)


class Planner(ABC):
    """Planner of a branch's calls. It is used by the thread that adds nodes to the branch."""

    @abstractmethod
    def plan(
        self, expressions: Sequence[Expression], role: str | None, where: Location | None
    ) -> Sequence[Expression]:
        """Splits a statement into its parts. Attaches an AnswerSource to generations and selections
        that should not call the backend directly.

        Args:
            role: role of the turn open before the statement, or None.
            where: line of the statement.

        Raises:
            CapabilityError: the backend can't serve the statement.
        """

    @abstractmethod
    def share_among_branches(self, added: Expression, size: int) -> Expression:
        """Prepares an expression that will be added to `size` equal branches. A single call may
        then answer its first generation for all branches.
        """

    @abstractmethod
    def fork(self, size: int) -> Sequence[Planner]:
        """Returns the planners of `size` branches forked from this one."""
