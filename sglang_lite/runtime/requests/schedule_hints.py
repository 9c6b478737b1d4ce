"""Hints for the scheduler about a program's branch: the tokens that its queued nodes are expected to add."""

from __future__ import annotations

from typing import Any

from sglang_lite.program.nodes import Fork, Gen, Node, Select, Text
from sglang_lite.program.play.branch import NOTHING_EXPECTED, Branch, ExpectedTokens
from sglang_lite.protocol import Choices, Number
from sglang_lite.runtime.requests.resolved_params import ResolvedParams

_BYTES_A_TOKEN = 4  # rough value for English; affects only the order of programs and the room kept for them
_NUMBER = 32  # tokens; no number of a typed constraint is longer


class ScheduleHints:
    """Hints about one branch of a program.

    Args:
        program: program that the branch belongs to; compared by identity.
        branch: the branch.
        priority: priority of its requests.

    Attributes:
        locked: True if a prefix of the cache is locked for the branch; set by the scheduler.
    """

    __slots__ = ("_branch", "locked", "priority", "program")

    def __init__(self, program: object, branch: Branch[Any, Any], priority: int = 0) -> None:  # of any driver
        self.program, self._branch, self.priority = program, branch, priority
        self.locked = False

    @property
    def expected(self) -> ExpectedTokens:
        """Tokens expected from the queued nodes, without the node that is being played."""
        return self._branch.expected

    @property
    def returns(self) -> bool:
        """True if the branch will need its text again."""
        return self._branch.returns


def expected_tokens(node: Node, params: ResolvedParams | None, branches: tuple[ExpectedTokens, ...]) -> ExpectedTokens:
    """Estimates the number of tokens that a node will add.

    Args:
        node: node of a program.
        params: parameters of a generation, else None.
        branches: estimate for each branch of a fork, else ().
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
