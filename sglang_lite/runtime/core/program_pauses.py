"""Branches of a program for the scheduler: what it is told of their pauses."""

from __future__ import annotations

import numpy as np

from sglang_lite.program.nodes import Gen, Path, Select
from sglang_lite.runtime.core.prepared_node import EngineAsk, EngineBranch
from sglang_lite.runtime.requests.scheduled_branch import ScheduledBranch, ScheduledProgram
from sglang_lite.runtime.scheduler.pauses import Pauses


class ProgramPauses:
    """Pauses of one program's branches. Used on the loop's thread.

    Args:
        pauses: pauses of all programs.
        priority: priority of the program.
        namespace: its namespace in the radix tree.
    """

    def __init__(self, pauses: Pauses, priority: int, namespace: str) -> None:
        self._pauses, self._namespace = pauses, namespace
        self._program = ScheduledProgram(priority)
        self._branches: dict[Path, ScheduledBranch] = {}

    def branch_of(self, ask: EngineAsk) -> ScheduledBranch:
        """Branch of a node that is starting. Ends the pauses of idle branches forked from it: most are not continued
        then."""
        node, branch = ask.node, self._branch(ask.branch)
        assert isinstance(node, Gen | Select)
        branch.name, branch.kind = node.name, branch.kind or node.name
        path = ask.branch.path
        if ask.branch.forks:
            for other, below in self._branches.items():
                if len(other) > len(path) and other[: len(path)] == path and not below.returns:
                    self._pauses.end(below)
        return branch

    def forked(self, branch: EngineBranch) -> None:
        """Begins the pause of a branch that has just been forked."""
        if branch.returns and branch.text is not None:
            ids = np.array(branch.text.log.fixed, dtype=np.int32)
            self._pauses.want(self._branch(branch), ids, self._namespace)

    def expect(self, path: Path, seconds: float) -> None:
        """Sets the expected duration of a branch's pause: of the one that has begun, or else the next."""
        if path in self._branches:  # else it has asked for nothing yet, and keeps nothing
            self._pauses.expect(self._branches[path], seconds)

    def idle(self, branch: EngineBranch) -> None:
        """Ends a branch's pause unless the branch may continue."""
        found = self._branches.get(branch.path)
        if found is not None and not found.may_return:
            self._pauses.end(found)

    def close(self) -> None:
        """Ends the pauses of idle branches, as no more nodes will be added."""
        self._program.open = False
        for branch in self._branches.values():
            if not branch.may_return:
                self._pauses.end(branch)

    def end(self) -> None:
        """Ends all pauses for good."""
        self._program.open = False
        for branch in self._branches.values():
            self._pauses.forget(branch)
        self._branches = {}  # breaks a reference cycle, so that no garbage collection is needed

    def _branch(self, branch: EngineBranch) -> ScheduledBranch:
        found = self._branches.get(branch.path)
        if found is None:
            found = self._branches[branch.path] = ScheduledBranch(self._program, branch)
        return found
