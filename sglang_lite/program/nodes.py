"""The nodes of a program, as plain data: the language makes them, a backend that plays whole programs is handed them.

A program is a tree of branches, each a sequence of nodes that only grows. A branch is named by its path: () is the
main one, (2, 0) the first branch of the fork that is node 2 of it. What is the caller's own Python (a check, a method
of choosing) is in no node: such a node is `held`. What came of it is told and not appended; the branch stops there,
without a slot, until the caller's verdict comes as further nodes.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from sglang_lite.protocol import UNSET, Constraint, SamplingParams, Unset
from sglang_lite.protocol.record import Record, Variant

Path: TypeAlias = tuple[int, ...]
Method: TypeAlias = Literal[
    "token_length_normalized", "greedy_token_selection", "unconditional_likelihood_normalized"
]  # as in choosing.METHODS


class Text(Variant, frozen=True):
    """Text, as it is.

    Attributes:
        ids: its tokens, where a model wrote it.
        special: as in Span.
    """

    text: str
    ids: tuple[int, ...] | None = None
    special: bool = True


class Gen(Variant, frozen=True):
    """A generation. Its first sample goes into the text.

    Attributes:
        name: of the variable.
        held: nothing goes into the text.
    """

    name: str | None = None
    params: SamplingParams = SamplingParams()
    constraint: Constraint | None = None
    held: bool = False


class Select(Variant, frozen=True):
    """A choice among texts, which goes into the text.

    Attributes:
        method: how it is chosen; None: the caller will say (the node is held).
        temperature: above 0, a draw from the softmax of the method's scores.
        seed: of that draw; UNSET for a fresh one.
        unconditional: score the choices without the prompt, too.
        special: of the choices, as in Span.
    """

    name: str | None
    choices: tuple[str, ...]
    method: Method | None = "token_length_normalized"
    temperature: float = 0.0
    seed: int | Unset = UNSET
    unconditional: bool = False
    special: bool = True


class Grammar(Variant, frozen=True):
    """From here on all text, `text` before it, is in the language of `whole`; None: up to here it is. Choices that
    can't go on there are left out of a selection; a fork's branches need not complete it, and text between which
    nothing is generated or selected is not checked: its author has."""

    whole: Constraint | None
    text: str = ""


class Fork(Variant, frozen=True):
    """Branches that go on from here, beside what follows, each with the nodes that are known of it."""

    branches: tuple[tuple[Node, ...], ...]


class Join(Variant, frozen=True):
    """Waits for branches, and appends the texts they added.

    Attributes:
        fork: the place of the fork among this branch's nodes; None: every fork since the last join.
        ends: of each branch, how many of its nodes are waited for; (): all there are.
    """

    fork: int | None = None
    ends: tuple[int, ...] = ()


class Mark(Variant, frozen=True):
    """A place to come back to."""


class Rollback(Variant, frozen=True):
    """Ends what is queued or under way after a mark, and goes back to it. Takes effect as soon as it comes.

    Attributes:
        mark: the mark's place among this branch's nodes.
    """

    mark: int


Node: TypeAlias = Text | Gen | Select | Grammar | Fork | Join | Mark | Rollback


class Program(Record, frozen=True):
    """A whole program: the nodes of its main branch."""

    nodes: tuple[Node, ...]
