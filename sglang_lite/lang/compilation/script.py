"""Scripts of bodies: the actions of a body while it was compiled, to be repeated with the values of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sglang_lite.program.nodes import JoinMode, Path
from sglang_lite.protocol import Location


@dataclass(frozen=True, slots=True)
class Submitted:
    """Addition of an expression to a branch.

    Attributes:
        branch: number of the branch.
        path: path of the node, if it is a generation or selection or has holes; else None.
        holes: whether the node has holes.
        refused: paths of attempts before the last one, whose values could not be read.
    """

    branch: int
    expression: Any  # an Expression or text, with symbols in it
    where: Location | None
    path: Path | None
    holes: bool
    refused: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Forked:
    branch: int
    children: tuple[int, ...]
    where: Location | None


@dataclass(frozen=True, slots=True)
class Joined:
    branch: int
    children: tuple[int, ...]
    mode: JoinMode


@dataclass(frozen=True, slots=True)
class Adopted:
    """End of `with s.copy()`: the parent branch adopts the variables of the child."""

    branch: int
    child: int


@dataclass(frozen=True, slots=True)
class Assigned:
    branch: int
    name: str
    value: Any  # of the body, as `kept` returns it


@dataclass(frozen=True, slots=True)
class Read:
    """Read of a variable by the body; without a name, wait for everything that was added to a branch."""

    branch: int
    name: str | None
    where: Location | None


@dataclass(frozen=True, slots=True)
class Marked:
    """Checkpoint, identified by the number of this action."""

    branch: int


@dataclass(frozen=True, slots=True)
class RolledBack:
    branch: int
    mark: int
    where: Location | None


@dataclass(frozen=True, slots=True)
class Called:
    """Call of the user's Python with values of nodes.

    Attributes:
        branch: number of the branch whose state has the method, or None for a function.
        function: name of the method, or the function.
        args, kwargs: arguments, as `kept` returns them.
    """

    branch: int | None
    function: Any
    args: Any
    kwargs: Any
    where: Location | None


Action: TypeAlias = Submitted | Forked | Joined | Adopted | Assigned | Read | Marked | RolledBack | Called


@dataclass(slots=True)
class Script:
    """Script of one way through a body.

    Attributes:
        actions: everything the body did, in order.
        cuts: for each decision, the number of actions before it.
        holds: sources of the values that only the caller's Python can compute, by the numbers of their fills.
        result: return value of the body, as `kept` returns it.
        reads: whether the caller's Python reads values from texts, which it may refuse.
        plain: for variables of the main branch whose values are texts of nodes, the path of the node, or a list of
            paths.
    """

    actions: list[Action] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    holds: list[Any] = field(default_factory=list)
    result: Any = None
    reads: bool = False
    plain: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scripts:
    """Scripts of a body, for all ways through it.

    Attributes:
        ways: scripts by the outcomes of their decisions.
    """

    ways: Mapping[tuple[int, ...], Script]

    def script(self, decided: tuple[int, ...]) -> Script:
        """Script of a way; for the beginning of a way, the first script that begins with these outcomes."""
        found = self.ways.get(decided)
        if found is None:
            found = next(script for way, script in self.ways.items() if way[: len(decided)] == decided)
        return found

    @property
    def reads(self) -> bool:
        """True if, on any way, the caller's Python reads values from texts."""
        return any(script.reads for script in self.ways.values())

    @property
    def waits(self) -> bool:
        """True if, on any way, the body reads variables or calls the user's Python with values of nodes."""
        return any(isinstance(action, Read | Called) for script in self.ways.values() for action in script.actions)
