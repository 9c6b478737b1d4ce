"""Branches of a plain interpreter: texts that grow, their values, and what a cancellation leaves of
them.

Imports nothing of the package.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any


class RaisedError(Exception):
    """An error at a line of the body: of the package (its class's name), or the body's own
    ("OwnError").
    """


@dataclass(eq=False)
class Wait:
    """Something that a branch waits for: an answer, or the texts of branches that it joins.

    `known`: somebody has waited for it. `joined`: how far each of these branches had come.
    """

    number: int
    known: bool = False
    joined: list[Point] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Point:
    """Point in a branch, behind so many of its waits. Whoever waits for it has waited for all
    before.
    """

    branch: Branch
    waits: tuple[Wait, ...]

    def see(self) -> None:
        fresh = [wait for wait in self.waits if not wait.known]
        for wait in fresh:
            wait.known = True
        for point in [point for wait in fresh for point in wait.joined]:
            point.see()
        if self.branch.fork_point is not None:
            self.branch.fork_point.see()

    def seen(self) -> bool:
        before = self.branch.fork_point
        return all(wait.known for wait in self.waits) and (before is None or before.seen())


class Race:
    """Bodies that run at the same time, and what each has waited for of what stands before their
    fork.

    A cancellation keeps a branch's text if all before its fork was waited for. If other bodies have
    waited for some of that, and the body that cancels has not, their speed decides.

    Args:
        fork_point: where the branches were forked.
    """

    def __init__(self, fork_point: Point | None) -> None:
        self._unknown: list[Wait] = []
        while fork_point is not None:
            self._unknown += [wait for wait in fork_point.waits if not wait.known]
            fork_point = fork_point.branch.fork_point
        self._seen: list[bool] = []  # by the bodies that have ended
        # whether bodies were cancelled when they had not waited for all of it
        self._cancelled: list[bool] = []
        self._all: list[Wait] = []  # that some body has waited for

    def next(self) -> None:
        """Begins a body, which has waited for nothing."""
        self._end_body()
        self._cancelled.append(False)

    def _end_body(self) -> None:
        if len(self._cancelled) > len(self._seen):
            known = [wait for wait in self._unknown if wait.known]
            self._seen.append(bool(known))
            self._all += known
            for wait in known:
                wait.known = False

    def cancelled(self) -> None:
        """Notes that a branch of the current body, or one of its own, is cancelled."""
        self._cancelled[-1] |= not all(wait.known for wait in self._unknown)

    def matters(self) -> bool:
        """Ends the last body. Returns True if the outcome depends on which body is faster."""
        self._end_body()
        for wait in self._all:
            wait.known = True
        return any(
            cancelled and any(seen for j, seen in enumerate(self._seen) if j != i)
            for i, cancelled in enumerate(self._cancelled)
        )


@dataclass(eq=False)
class Value:
    """What a variable has, or the class of the error that reading it raises. `node`: the node that
    made it, as its path in the program's tree and its number there. `point`: what whoever reads it
    has waited for. `parts`: values that it was joined from. `taken`: a cancellation took it
    away.
    """

    value: Any = None
    error: str | None = None
    node: tuple[Any, ...] | None = None
    point: Point | None = None
    parts: tuple[Value, ...] = ()
    taken: bool = False

    def see(self) -> None:
        for part in self.parts:
            part.see()
        if self.point is not None and self.error:
            self.point.branch.failure_seen = True
        elif self.point is not None:
            self.point.see()

    def take(self) -> None:
        self.error = "RequestAbortedError"
        self.taken = True


@dataclass
class Branch:
    """A text that grows. `inherited`: the variables of its parent when it was forked."""

    path: tuple[Any, ...] = ()
    text: str = ""
    names: dict[str, Value] = field(default_factory=dict)
    error: str | None = None
    role: tuple[str, int] | None = None  # of the open turn, and where its text begins
    turns: list[tuple[str, str]] = field(default_factory=list)
    grammar: tuple[frozenset[str], int] | None = None  # that is open, and where its text begins
    nodes: int = 0
    begins: int = 0
    inherited: dict[str, Value] = field(default_factory=dict)
    forks: list[Branch] = field(default_factory=list)
    gone: bool = False  # a rollback has removed its fork
    depth: int = 0
    waits: tuple[Wait, ...] = ()
    count: int = 0  # of waits, with those that a rollback has removed
    fork_point: Point | None = None  # of its parent
    # Its own, also those whose name has another value now or that a rollback has removed.
    declared: list[Value] = field(default_factory=list)
    # number of the last wait that joins took, by their depth
    claims: dict[int, int] = field(default_factory=dict)
    failure_seen: bool = False
    cancelled: int | None = None  # number of the last wait that a cancellation has left
    stopped: bool = False  # from outside: nothing undoes it

    def copied(self) -> Branch:
        return replace(
            self,
            names=dict(self.names),
            turns=list(self.turns),
            forks=list(self.forks),
            declared=list(self.declared),
        )

    def fork(self, number: int) -> Branch:
        child = replace(self.copied(), path=(*self.path, len(self.forks), number), nodes=0)
        child.inherited, child.begins, child.forks = dict(self.names), len(self.text), []
        child.depth, child.waits, child.count, child.fork_point = (
            self.depth + 1,
            (),
            0,
            self.point(),
        )
        child.declared, child.claims = [], {}
        child.failure_seen = child.stopped = False
        child.cancelled = None
        return child

    # -------------------------------------------------------------------------------- cancellations

    def point(self) -> Point:
        return Point(self, self.waits)

    def wait(self, *joined: Point) -> None:
        """Something is added that the branch waits for."""
        if self.cancelled is None:
            self.count += 1
            self.waits = (*self.waits, Wait(self.count, joined=list(joined)))

    def touch(self) -> None:
        """Something is added: behind a cancellation, it fails the branch."""
        if self.cancelled is not None:
            self.error = self.error or "RequestAbortedError"

    def declare(self, name: str, value: Value) -> None:
        self.names[name] = value
        self.declared.append(value)

    def claim(self, depth: int) -> None:
        """A join in a branch of this depth takes what there is."""
        self.claims = {**self.claims, depth: max([0, *(wait.number for wait in self.waits)])}
        for child in self.forks:
            child.claim(depth)

    def cancel(self, depth: int, outside: bool) -> None:
        """Keeps what was waited for, and what joins above the cancelled branch, of this depth, have
        taken.
        """
        for child in self.forks:
            child.cancel(depth, outside)
        self.stopped = self.stopped or outside
        if self.cancelled is not None and (self.error or not outside):
            return
        if self.error and self.failure_seen:
            return
        kept = max([-1, *(number for joining, number in self.claims.items() if joining < depth)])
        if self.fork_point is None or self.fork_point.seen():
            kept = max([kept, 0, *(wait.number for wait in self.waits if wait.known)])
        self.cancelled = kept
        if outside or kept < 0 or any(wait.number > kept for wait in self.waits):
            self.error = "RequestAbortedError"
        for value in self.declared:
            point, parts = value.point, value.parts
            if any(part.taken for part in parts) or (
                point is not None
                and point.branch is self
                and any(wait.number > kept and not wait.known for wait in point.waits)
            ):
                value.take()

    def own(self) -> dict[str, Value]:
        return {
            name: value
            for name, value in self.names.items()
            if self.inherited.get(name) is not value
        }

    def write(self, text: str) -> None:
        """Appends text, unless the branch has failed."""
        if self.error is None:
            self.text += text

    def remove(self) -> None:
        """Ends the branch and its own branches, as a rollback removes its fork."""
        self.gone = True
        for child in self.forks:
            child.remove()

    def read(self, name: str | None) -> Any:
        if self.gone:
            return known("RequestAbortedError")
        if name is None:
            if self.error:
                self.failure_seen = True
                return known(self.error)
            self.point().see()
            return self.text
        if name not in self.names:
            return known(self.error if self.stopped and self.error else "UnknownVariableError")
        found = self.names[name]
        found.see()
        return known(found.error) if found.error else found.value


def known(error: str) -> Any:
    return "!", error
