"""Script of a body: what it did while it was compiled, to be done again for the values of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from sglang_lite.program.nodes import JoinMode, Path
from sglang_lite.protocol import Location


@dataclass(frozen=True, slots=True)
class Submitted:
    """An expression that was added to a branch.

    Attributes:
        path: of the generation or selection that it is.
        refused: paths of attempts at it whose values could not be read.
    """

    branch: int
    expression: Any  # an Expression or text, with holes in it
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
    """`with s.copy()`: the variables of a branch become its parent's."""

    branch: int
    child: int


@dataclass(frozen=True, slots=True)
class Assigned:
    branch: int
    name: str
    value: Any  # whatever the body gave


@dataclass(frozen=True, slots=True)
class Read:
    """A variable that the body has read; without a name, it waited for all of a branch."""

    branch: int
    name: str | None
    where: Location | None


@dataclass(frozen=True, slots=True)
class Marked:
    """A place to come back to, known by the number of this action."""

    branch: int


@dataclass(frozen=True, slots=True)
class RolledBack:
    branch: int
    mark: int
    where: Location | None


@dataclass(frozen=True, slots=True)
class Called:
    """A call of the user's Python with what nodes have brought.

    Attributes:
        branch: whose state's method it is, by that name; None: of none.
        function: that name, or what is called.
    """

    branch: int | None
    function: Any
    args: Any
    kwargs: Any
    where: Location | None


Action: TypeAlias = Submitted | Forked | Joined | Adopted | Assigned | Read | Marked | RolledBack | Called


@dataclass(slots=True)
class Script:
    """Actions of a body, in order.

    Attributes:
        actions: of it.
        cuts: of each decision, the number of actions before it.
        holds: origins of the values that only the caller's Python has, by their numbers.
        result: what it returned.
        reads: values are read of texts by the caller's Python, which may refuse them.
        plain: names of variables of the main branch whose values are the texts of nodes, or lists of them.
    """

    actions: list[Action] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    holds: list[Any] = field(default_factory=list)
    result: Any = None
    reads: bool = False
    plain: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scripts:
    """Actions of a body, for each way through it.

    Attributes:
        ways: scripts, by what was decided on the way.
    """

    ways: Mapping[tuple[int, ...], Script]

    def script(self, decided: tuple[int, ...]) -> Script:
        """The script of a way; of one that was broken off, of the first that begins so."""
        found = self.ways.get(decided)
        if found is None:
            found = next(script for way, script in self.ways.items() if way[: len(decided)] == decided)
        return found

    @property
    def reads(self) -> bool:
        """True if, on any way, values are read of texts by the caller's Python."""
        return any(script.reads for script in self.ways.values())

    @property
    def waits(self) -> bool:
        """True if, on any way, the body reads values, or calls the user's Python with them."""
        return any(isinstance(action, Read | Called) for script in self.ways.values() for action in script.actions)
