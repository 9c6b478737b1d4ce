"""Programs that a runtime plays by itself, as segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from sglang_lite.protocol.constraints import Constraint
from sglang_lite.protocol.results import Selection
from sglang_lite.protocol.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class TextSegment:
    """Text, as it is; `special` as in Span."""

    text: str
    special: bool = True


@dataclass(frozen=True, slots=True)
class GenSegment:
    """A generation: one sample, which goes into the text."""

    name: str | None = None
    params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class SelectSegment:
    """A choice among texts. `pick` says which one goes into the text, from the scores of all; None takes the one with
    the largest mean log-probability per token. `special` as in Span, of the choices."""

    name: str | None
    choices: tuple[str, ...]
    pick: Callable[[Selection], str] | None = None
    unconditional: bool = False
    special: bool = True


@dataclass(frozen=True, slots=True)
class GrammarSegment:
    """From here on all text, `text` before it, is in the language of `whole`; None: up to here it is. Choices that
    can't go on there are left out of a selection; a fork's branches need not complete it."""

    whole: Constraint | None
    text: str = ""


@dataclass(frozen=True, slots=True)
class ForkSegment:
    """Branches that go on from here, each with segments of its own, beside what follows."""

    branches: tuple[tuple[Segment, ...], ...]


@dataclass(frozen=True, slots=True)
class JoinSegment:
    """Waits for the branches of every fork before it since the last join, and appends the texts they added."""


Segment: TypeAlias = "TextSegment | GenSegment | SelectSegment | GrammarSegment | ForkSegment | JoinSegment"


@dataclass(frozen=True, slots=True)
class Program:
    """Segments that a runtime plays by itself."""

    segments: tuple[Segment, ...]
