"""Programs as data: trees of the steps that a body takes. Imports nothing of the package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias


class Step:
    """One thing that a body does."""


Steps: TypeAlias = "tuple[Step, ...]"


@dataclass(frozen=True)
class Text(Step):
    text: str


@dataclass(frozen=True)
class Gen(Step):
    """`given`: what `gen` takes, with the names of checks and backends for themselves."""

    name: str | None
    given: tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Select(Step):
    name: str
    choices: tuple[str, ...]
    method: str = "token_length_normalized"
    temperature: float = 0.0
    multi: bool = False


@dataclass(frozen=True)
class Sum(Step):
    """Several of text, generations and selections added as one expression."""

    parts: Steps


@dataclass(frozen=True)
class Read(Step):
    """Reads a variable, or the text, and continues by what it is. `paste`: adds it to the text,
    too.
    """

    name: str | None
    paste: bool
    ways: tuple[Steps, ...] = ()


@dataclass(frozen=True)
class Fork(Step):
    """
    Attributes:
        first: added to all branches as to a group.
        bodies: one a branch.
        beside: what the parent does meanwhile.
        join: how the branches are joined; None: not.
        together: the bodies run in threads or tasks of their own.
        read: of which branches which names are read, before the join.
        undone: of the first branch, taken before the join in a checkpoint that is rolled back after
            it.
        after: what the branches do after the join, one a branch.
        again: how the branches are joined once more.
    """

    first: Steps
    bodies: tuple[Steps, ...]
    beside: Steps
    join: str | None
    together: bool
    read: tuple[tuple[int, str], ...]
    undone: Steps = ()
    after: tuple[Steps, ...] = ()
    again: str | None = None


@dataclass(frozen=True)
class Abandoned(Step):
    """A fork behind a checkpoint that is rolled back: `read` is read of the first branch before,
    `after` is done in the branches afterwards.
    """

    body: Steps
    bodies: tuple[Steps, ...]
    read: str | None
    after: tuple[Steps, ...]


@dataclass(frozen=True)
class Copy(Step):
    body: Steps


@dataclass(frozen=True)
class Scope(Step):
    name: str
    body: Steps


@dataclass(frozen=True)
class Turn(Step):
    role: str
    body: Steps
    block: bool


@dataclass(frozen=True)
class Grammar(Step):
    pattern: str
    body: Steps


@dataclass(frozen=True)
class Checkpoint(Step):
    """Does `body`, `times` times taken back; `read`: a variable that is read before; then `last`."""

    body: Steps
    times: int
    read: str | None
    last: Steps


@dataclass(frozen=True)
class Attempt(Step):
    """Continues after what `body` raises."""

    body: Steps


@dataclass(frozen=True)
class Raise(Step):
    """The body's own error."""


@dataclass(frozen=True)
class Cancel(Step):
    """Cancels a branch while a node of it is under way that never ends."""

    node: Gen
    join: str | None


@dataclass(frozen=True)
class Stop(Step):
    """Cancels the branch at this line; `outside`: as somebody does who is not part of the body."""

    outside: bool


@dataclass(frozen=True)
class Nested(Step):
    """A program that continues the state's text."""

    body: Steps


@dataclass(frozen=True)
class Call(Step):
    """A program that runs by itself."""

    body: Steps


@dataclass(frozen=True)
class UseTools(Step):
    """Lets the model call tools, in so many turns at most, until it answers."""

    name: str
    most: int


@dataclass(frozen=True)
class Set(Step):
    name: str
    value: int


@dataclass(frozen=True)
class Image(Step):
    """Refused."""


@dataclass(frozen=True)
class RandomProgram:
    steps: Steps
    is_async: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


def walk(steps: Steps) -> Iterator[Step]:
    """All steps, at all depths."""
    for step in steps:
        yield step
        for inner in inside(step).values():
            yield from walk(inner)


def inside(step: Step) -> dict[tuple[str, int | None], Steps]:
    """The lists of steps that a step has."""
    found: dict[tuple[str, int | None], Steps] = {}
    for name in (f.name for f in fields(step)):  # type: ignore[arg-type]  # every step is a dataclass
        value = getattr(step, name)
        if isinstance(value, tuple) and value and all(isinstance(each, Step) for each in value):
            found[name, None] = value
        elif name in ("ways", "bodies", "after"):
            found.update({(name, i): each for i, each in enumerate(value)})
    return found


def names(steps: Steps) -> list[str]:
    return sorted(
        {step.name for step in walk(steps) if isinstance(getattr(step, "name", None), str)}
    )
