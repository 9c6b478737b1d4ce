"""Decisions of a program that is being played: once the values for a decision are known, the nodes of the chosen part
are added."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang_lite.program.control_flow import holds, needed_nodes, unfilled
from sglang_lite.program.nodes import Decision, Fill, Path
from sglang_lite.protocol import SglError
from sglang_lite.runtime.core.branch_queue import QueuedNode
from sglang_lite.runtime.core.program_branch import Branch


class ProgramOfDecisions(Protocol):
    """Interface of the program that decisions need; implemented by program_player.py."""

    ended: bool

    def branch(self, path: Path) -> Branch: ...
    def value(self, path: Path, waiter: Decisions) -> str | list[str] | None: ...
    def add(self, nodes: Sequence[tuple[Path, Sequence[QueuedNode]]], *, last: bool) -> None: ...
    def fail(self, error: SglError) -> None: ...


class PreparedPart:
    """A part of a program, with its nodes prepared for playing.

    Attributes:
        added: path of each extended branch, with the nodes to add.
        decision: decision after the part, or None after the last part.
    """

    __slots__ = ("added", "decision")

    def __init__(self, added: Sequence[tuple[Path, Sequence[QueuedNode]]], decision: Decision | None) -> None:
        self.added, self.decision = added, decision


class Decisions:
    """Decisions of a program, made one after another on the loop's thread.

    Args:
        player: program that the decisions belong to.
        first: decision after the program's first nodes.
        parts: all parts of the program, prepared.

    Attributes:
        pending: next decision, or None if no more are to be made.
    """

    def __init__(self, player: ProgramOfDecisions, first: Decision, parts: Sequence[PreparedPart]) -> None:
        self._player, self._parts = player, parts
        self.pending: Decision | None = first

    def resume(self) -> None:
        """Makes all decisions whose values are known. If one is missing, this method is called again when more is
        known."""
        while self.pending is not None and not self._player.ended:
            decision = self.pending
            try:
                outcome = self._outcome(decision)
            except SglError as error:
                self.pending = None
                self._player.fail(error)  # as if the program's body raised it
                return
            if outcome is None:
                return
            part = self._parts[decision.parts[outcome]]
            self.pending = part.decision
            self._player.add(part.added, last=part.decision is None)

    def _outcome(self, decision: Decision) -> int | None:
        """Index of the chosen part in `decision.parts`, or None if a value is not known yet.

        Raises:
            SglError: a node that the decision needs has failed, or its value can't be compared.
        """
        for path in decision.after:
            branch = self._player.branch(path[:-1])
            if not branch.is_played(path[-1] + 1):
                if branch.error is not None:
                    raise branch.error
                branch.wake_when_played(self)
                return None
        values: dict[Path, str | list[str]] = {}
        for path in needed_nodes(decision):
            value = self._player.value(path, self)
            if value is None:
                return None
            values[path] = value

        def known(fill: Fill) -> str | list[str]:
            if fill.node is None:
                raise unfilled(fill)
            return values[fill.node]

        return 0 if decision.condition is None or holds(decision.condition, known) else 1
