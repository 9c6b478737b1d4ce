"""Prospects of a program's branch: what is known of the nodes that it has yet to play. Written by the branch, read by
the scheduler, on one thread."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_lite.program.nodes import Fork, Gen, Node, Select, Text
from sglang_lite.protocol import Choices, Number
from sglang_lite.runtime.resolved_params import ResolvedParams

_BYTES_A_TOKEN = 4  # of English, roughly; only the order of programs and the room kept for them depend on it
_NUMBER = 32  # tokens: no number of a type is longer


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """Tokens that nodes are expected to bring.

    Attributes:
        text: that are written out.
        generated: that may be generated, at most.
        path: one after another, along the longest branch.
    """

    text: int = 0
    generated: int = 0
    path: int = 0

    def __add__(self, other: ExpectedTokens) -> ExpectedTokens:
        return ExpectedTokens(self.text + other.text, self.generated + other.generated, self.path + other.path)

    def __sub__(self, other: ExpectedTokens) -> ExpectedTokens:
        return ExpectedTokens(self.text - other.text, self.generated - other.generated, self.path - other.path)


NOTHING_EXPECTED = ExpectedTokens()


class ScheduleHints:
    """
    Args:
        program: that the branch belongs to; told apart by identity.
        priority: of its requests.

    Attributes:
        ahead: of the nodes that are queued, and not of the one that is being played.
        held: a prefix is held for it; the scheduler's.
        returns: the branch will need its text again: it has nodes to play, or waits for a verdict on what it has
            generated.
    """

    __slots__ = ("ahead", "held", "priority", "program", "returns")

    def __init__(self, program: object, priority: int = 0) -> None:
        self.program, self.priority = program, priority
        self.ahead = NOTHING_EXPECTED
        self.held = self.returns = False


def ahead_of(node: Node, params: ResolvedParams | None, branches: tuple[ExpectedTokens, ...]) -> ExpectedTokens:
    """Tokens that a node is expected to bring.

    Args:
        params: of a generation.
        branches: of a fork.
    """
    match node:
        case Text(text, ids):
            count = len(ids) if ids is not None else _tokens(text)
            return ExpectedTokens(count, 0, count)
        case Gen(constraint=constraint) if params is not None:
            most = params.max_tokens
            if isinstance(constraint, Number):
                most = min(most, _NUMBER)
            elif isinstance(constraint, Choices):
                lengths = (len(option.encode("utf-8", "surrogatepass")) for option in constraint.options)
                most = min(most, max(lengths, default=0))
            return ExpectedTokens(0, most * params.n, most)
        case Select(choices=choices):
            longest = max(map(_tokens, choices), default=0)
            return ExpectedTokens(sum(map(_tokens, choices)), 0, longest)
        case Fork():
            return ExpectedTokens(
                sum(branch.text for branch in branches),
                sum(branch.generated for branch in branches),
                max((branch.path for branch in branches), default=0),
            )
    return NOTHING_EXPECTED


def _tokens(text: str) -> int:
    return -(-len(text) // _BYTES_A_TOKEN)
