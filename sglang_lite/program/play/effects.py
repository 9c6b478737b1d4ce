"""Effects of a player: what its driver performs, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias

from sglang_lite.program.nodes import Path
from sglang_lite.program.play.branch import Ask, Branch, QueuedT, TextT
from sglang_lite.protocol import SglError


@dataclass(frozen=True, eq=False, slots=True)
class Cancel(Generic[TextT, QueuedT]):
    """Effect: the answer is not needed any more."""

    ask: Ask[TextT, QueuedT]


@dataclass(frozen=True, eq=False, slots=True)
class Failed:
    """Effect: a node failed, or will not be played.

    Attributes:
        path: path of the node: that of its branch, and its place.
        name: name of its variable, or None.
        error: why.
        attempt: as of Ask.
    """

    path: Path
    name: str | None
    error: SglError
    attempt: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Forked(Generic[TextT, QueuedT]):
    """Effect: a branch begins, as its fork was played."""

    branch: Branch[TextT, QueuedT]


@dataclass(frozen=True, eq=False, slots=True)
class Idle(Generic[TextT, QueuedT]):
    """Effect: a branch has nothing to play."""

    branch: Branch[TextT, QueuedT]


@dataclass(frozen=True, eq=False, slots=True)
class Ended:
    """Effect: the program has ended, with an error or None. It is the last effect."""

    error: SglError | None


Effect: TypeAlias = (
    Ask[TextT, QueuedT] | Cancel[TextT, QueuedT] | Failed | Forked[TextT, QueuedT] | Idle[TextT, QueuedT] | Ended
)
