"""Decisions of a program that is played: once what one needs is there, the nodes of the next part come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang_lite.program.control_flow import asked, holds, unfilled
from sglang_lite.program.nodes import Decision, Fill, Path
from sglang_lite.protocol import SglError
from sglang_lite.runtime.core.branch_queue import Queued
from sglang_lite.runtime.core.program_branch import Branch


class ProgramOfDecisions(Protocol):
    """The program, as far as its decisions know it: see program_player.py."""

    ended: bool

    def branch(self, path: Path) -> Branch: ...
    def value(self, path: Path, waiting: Decisions) -> str | list[str] | None: ...
    def add(self, nodes: Sequence[tuple[Path, Sequence[Queued]]], *, last: bool) -> None: ...
    def fail(self, error: SglError) -> None: ...


class PreparedPart:
    """A part whose nodes are prepared.

    Attributes:
        added: nodes, by their branches.
    """

    __slots__ = ("added", "decision")

    def __init__(self, added: Sequence[tuple[Path, Sequence[Queued]]], decision: Decision | None) -> None:
        self.added, self.decision = added, decision


class Decisions:
    """Decisions of a program, one after another. All on the loop's thread.

    Args:
        first: the one after the program's first nodes.
    """

    def __init__(self, player: ProgramOfDecisions, first: Decision, parts: Sequence[PreparedPart]) -> None:
        self._player, self._parts = player, parts
        self.pending: Decision | None = first

    def go_on(self) -> None:
        """Makes the decision that is next, if what it needs is there; else it is called again when more is."""
        while self.pending is not None and not self._player.ended:
            decision = self.pending
            try:
                outcome = self._outcome(decision)
            except SglError as error:
                self.pending = None
                self._player.fail(error)  # as where a body raises
                return
            if outcome is None:
                return
            part = self._parts[decision.parts[outcome]]
            self.pending = part.decision
            self._player.add(part.added, last=part.decision is None)

    def _outcome(self, decision: Decision) -> int | None:
        """Index of the part that comes; None: it is not known yet.

        Raises:
            SglError: a node that is needed has failed, or can't be decided by.
        """
        for path in decision.after:
            branch = self._player.branch(path[:-1])
            if not branch.through(path[-1] + 1):
                if branch.error is not None:
                    raise branch.error
                branch.wake_when_through(self)
                return None
        values: dict[Path, str | list[str]] = {}
        for path in asked(decision):
            value = self._player.value(path, self)
            if value is None:
                return None
            values[path] = value

        def known(fill: Fill) -> str | list[str]:
            if fill.node is None:
                raise unfilled(fill)
            return values[fill.node]

        return 0 if decision.condition is None or holds(decision.condition, known) else 1
