"""The scheduler's view of a program and its branches: their order, and how many tokens they are
expected to add.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from sglang_lite.program.nodes import Fork, Gen, Node, Select, Text
from sglang_lite.program.play.branch import NOTHING_EXPECTED, ExpectedTokens
from sglang_lite.protocol import Choices, Number
from sglang_lite.runtime.requests.resolved_params import ResolvedParams

# rough value for English; affects only the order of programs and the room kept for them
_BYTES_A_TOKEN = 4
_NUMBER = 32  # tokens; no number of a typed constraint is longer


class BranchState(Protocol):
    """State of a branch, as the scheduler reads it. The branch belongs to a program
    (program/play/branch.py) or a session. The attributes are those of a program's branch.
    """

    @property
    def expected(self) -> ExpectedTokens: ...
    @property
    def queue(self) -> Sequence[object]: ...
    @property
    def ask(self) -> object | None: ...
    @property
    def paused(self) -> object | None: ...
    @property
    def error(self) -> object | None: ...
    @property
    def will_return(self) -> bool: ...


class ScheduledProgram:
    """Program, as seen by the scheduler.

    Args:
        priority: priority of its requests.

    Attributes:
        arrival: id of its first request; infinite before.
        open: True while its caller may add nodes.
    """

    __slots__ = ("arrival", "open", "priority")

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self.arrival = math.inf
        self.open = True


class ScheduledBranch:
    """Branch of a program, as seen by the scheduler.

    Args:
        program: program of the branch.
        branch: the branch.

    Attributes:
        name: name of the generation or selection it executed last, or None.
        kind: name of the first generation or selection that had a name.
        length: tokens at its last pause; 0 before.
        evicted: True if pages of its prefix were evicted since its last pause began.
        next_pause_s: duration of its next pause in seconds, if its caller has reported it.
    """

    __slots__ = ("_branch", "evicted", "kind", "length", "name", "next_pause_s", "program")

    def __init__(self, program: ScheduledProgram, branch: BranchState) -> None:
        self.program = program
        self._branch = branch
        self.name: str | None = None
        self.kind: str | None = None
        self.length = 0
        self.evicted = False
        self.next_pause_s: float | None = None

    @property
    def expected(self) -> ExpectedTokens:
        """Tokens expected from the queued nodes, excluding the running node."""
        return self._branch.expected

    @property
    def awaits_caller(self) -> bool:
        """Whether the branch can't continue until its program's caller acts."""
        branch = self._branch
        return branch.ask is None and (branch.paused is not None or not branch.queue)

    @property
    def will_return(self) -> bool:
        """True if the branch will need its text again."""
        return self._branch.will_return

    @property
    def may_return(self) -> bool:
        """Whether the branch will, or may, need its text again: its caller may still add nodes."""
        return self._branch.will_return or (self.program.open and self._branch.error is None)


def estimate_node_tokens(
    node: Node, params: ResolvedParams | None, branches: tuple[ExpectedTokens, ...]
) -> ExpectedTokens:
    """Estimates the number of tokens that a node will add.

    Args:
        node: node of a program.
        params: parameters of a generation, otherwise None.
        branches: estimate for each branch of a fork, otherwise ().
    """
    match node:
        case Text(text, ids):
            count = len(ids) if ids is not None else _estimate_text_tokens(text)
            return ExpectedTokens(count, 0, count)
        case Gen(constraint=constraint) if params is not None:
            most = params.max_tokens
            if isinstance(constraint, Number):
                most = min(most, _NUMBER)
            elif isinstance(constraint, Choices):
                lengths = (
                    len(option.encode("utf-8", "surrogatepass")) for option in constraint.options
                )
                most = min(most, max(lengths, default=0))
            return ExpectedTokens(0, most * params.n, most)
        case Select(choices=choices):
            longest = max(map(_estimate_text_tokens, choices), default=0)
            return ExpectedTokens(sum(map(_estimate_text_tokens, choices)), 0, longest)
        case Fork():
            return ExpectedTokens(
                sum(branch.text for branch in branches),
                sum(branch.generated for branch in branches),
                max((branch.path for branch in branches), default=0),
            )
    return NOTHING_EXPECTED


def _estimate_text_tokens(text: str) -> int:
    return -(-len(text) // _BYTES_A_TOKEN)
