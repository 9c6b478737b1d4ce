"""Interface of planners, and what else a backend that is called generation by generation knows of a run: so one call
may bring several answers, or one generation wait for another's."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from sglang_lite.lang.backend.base import Backend, only_answer
from sglang_lite.program.nodes import Expression
from sglang_lite.protocol import Constraint, Delta, Generation, Location, Prompt, SamplingParams, Selection
from sglang_lite.protocol.sampling import NO_PARAMS

# True while a selection needs the scores of its choices.
scores_needed: ContextVar[bool] = ContextVar("sglang_lite_scores_needed", default=False)

# Drafts end below this rate of hits, after at least this number of generations.
_MIN_SEEN, _MIN_RATE = 32, 0.5


@dataclass(slots=True, eq=False)
class ApiDrafts:
    """Generations that a program's calls of an API may draft for later ones of the same turn, and how often that paid
    in all runs of the program so far.

    Args:
        tokens: maximum number of tokens that a call may generate ahead, or None for no drafts.

    Attributes:
        found: number of generations whose text an earlier call had brought.
        missed: number of generations that an earlier call could have brought, but that needed a call.
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
    def on(self) -> bool:
        """True if the next run will have drafts: False after at least 32 generations of which less than half were
        found."""
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
    """Facts of a run that its calls are planned by.

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
    def of(cls, params: SamplingParams, drafts: ApiDrafts | None, *, shares: bool = True) -> RunFacts:
        """Facts of a run that begins now, with the drafts of its program, if it has any."""
        if drafts is None or drafts.tokens is None:
            return cls(params, shares=shares)
        return cls(params, drafts, drafts.on, shares)


@dataclass(frozen=True, slots=True)
class NodeQuestion:
    """Question that a node asks a backend: the arguments of `Backend.agenerate`."""

    backend: Backend
    prompt: Prompt
    params: SamplingParams = NO_PARAMS
    constraint: Constraint | None = None
    stream: bool = False

    def events(self) -> AsyncGenerator[Delta | Generation, None]:
        """Asks for the generation, and yields its events."""
        return self.backend.agenerate(self.prompt, self.params, self.constraint, stream=self.stream)

    async def answer(self, prompt: Prompt, params: SamplingParams, constraint: Constraint | None = None) -> Generation:
        """Only sample of another question of the same backend."""
        return await only_answer(self.backend.agenerate(prompt, params, constraint, stream=False))

    async def selection(self, choices: Sequence[str]) -> Selection:
        """Asks for a selection."""
        return await self.backend.aselect(self.prompt, choices, unconditional=False)


class AnswerSource(ABC):
    """Source of a node's answer in place of a call of its own. Used on the executor loop."""

    @asynccontextmanager
    async def entered(self, text: str) -> AsyncIterator[None]:
        """Context in which the node is asked for, in all its attempts. A wait at its beginning does not count toward
        the node's timeout.

        Args:
            text: text of the branch before the node.
        """
        yield

    @abstractmethod
    def agenerate(self, question: NodeQuestion) -> AsyncGenerator[Delta | Generation, None]:
        """Yields the events of the generation, as `question.events()` would."""

    async def aselect(self, question: NodeQuestion, choices: Sequence[str]) -> Selection:
        """Answer of the selection, as `question.selection(choices)` would return it."""
        return await question.selection(choices)


class Planner(ABC):
    """Planner of a branch's calls, for the thread that adds to the branch."""

    @abstractmethod
    def plan(self, expressions: Sequence[Expression], role: str | None, where: Location | None) -> Sequence[Expression]:
        """Parts of a statement, with the sources of the generations and selections that have one.

        Args:
            role: role of the turn that is open before the statement, or None.
            where: line of the statement.

        Raises:
            CapabilityError: the backend can't serve the statement.
        """

    @abstractmethod
    def share(self, added: Expression, size: int) -> Expression:
        """Expression that is added to `size` equal branches, whose first generation may be one call for all."""

    @abstractmethod
    def fork(self, size: int) -> Sequence[Planner]:
        """Planners of the branches that are forked from this one."""
