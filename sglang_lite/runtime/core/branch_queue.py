"""Nodes of a branch that are yet to be played, in order."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from sglang_lite.program.nodes import Fill, Gen, GrammarBegin, GrammarEnd, Join, Node, Select, Text
from sglang_lite.protocol import ParameterError, Span
from sglang_lite.runtime.resolved_params import ResolvedParams
from sglang_lite.runtime.schedule_hints import NOTHING_EXPECTED, ExpectedTokens, ScheduleHints
from sglang_lite.runtime.structured_output.base import CompiledGrammar, Matcher

_WAITED_FOR = (Gen, Select, Join, Fill, GrammarBegin, GrammarEnd)


@dataclass(eq=False, slots=True)
class Queued:
    """A node that is to be played.

    Attributes:
        grammar: of its constraint, being compiled.
        params: of a generation, or why they are refused.
        branches: of a fork.
        text: the text that it was foreseen to continue, after the last generated token; None: not foreseen.
        ids: of `text`, being made.
        matcher: of its grammar, being made for the one row that is next.
        ahead: tokens that it is expected to bring.
    """

    node: Node
    grammar: Future[CompiledGrammar] | None = None
    params: ResolvedParams | ParameterError | None = None
    branches: Sequence[Sequence[Queued]] = ()
    text: list[Span] | None = None
    ids: Future[array[int]] | None = None
    matcher: Future[Matcher] | None = None
    ahead: ExpectedTokens = NOTHING_EXPECTED


class BranchQueue:
    """Queue of nodes, each with its place among all that its branch was ever given.

    Args:
        prospect: of the branch; what the queue holds is added to it.
        left: called with the number of nodes that leave the queue.

    Attributes:
        foreseen: the text after the last generated token, when all that is queued is played; None: not known.
    """

    def __init__(self, prospect: ScheduleHints, left: Callable[[int], None]) -> None:
        self._prospect, self._left = prospect, left
        self._nodes: deque[tuple[int, Queued]] = deque()
        self.count = 0  # nodes that have come
        self.foreseen: list[Span] | None = None

    def __bool__(self) -> bool:
        return bool(self._nodes)

    @property
    def first(self) -> tuple[int, Queued]:
        """The node that is next, with its place."""
        return self._nodes[0]

    @property
    def next_place(self) -> int:
        """Place of the node that is next; of the one that will come, where there is none."""
        return self._nodes[0][0] if self._nodes else self.count

    @property
    def waits(self) -> bool:
        """True where something that is queued takes a while."""
        return any(isinstance(entry.node, Gen | Select | Join | Fill) for _, entry in self._nodes)

    @property
    def next_to_wait(self) -> Queued | None:
        """The first node that takes a while, or may."""
        return next((entry for _, entry in self._nodes if isinstance(entry.node, _WAITED_FOR)), None)

    def place(self, count: int = 1) -> int:
        """Place of the first of `count` nodes that come now."""
        place, self.count = self.count, self.count + count
        return place

    def add(self, place: int, entry: Queued) -> None:
        """Queues a node."""
        self.foreseen = _foreseen_after(entry.node, self.foreseen)
        self._nodes.append((place, entry))
        self._prospect.ahead += entry.ahead

    def take_first(self) -> None:
        """Takes the next node out, which is played now."""
        _, entry = self._nodes.popleft()
        self._prospect.ahead -= entry.ahead
        self._left(1)

    def roll_back(self, mark: int, place: int, entry: Queued) -> bool:
        """Takes out what stands behind a mark that is queued itself. False: it is not.

        Args:
            place, entry: of the rollback, which does nothing when it is played, but is played.
        """
        if all(at != mark for at, _ in self._nodes):
            return False
        while self._nodes[-1][0] > mark:
            _, gone = self._nodes.pop()
            self._prospect.ahead -= gone.ahead
            self._left(1)
        self.foreseen = None
        self._nodes.append((place, entry))
        return True

    def clear(self) -> None:
        """Takes all nodes out."""
        self._left(len(self._nodes))
        self._nodes.clear()
        self._prospect.ahead = NOTHING_EXPECTED


def _foreseen_after(node: Node, foreseen: list[Span] | None) -> list[Span] | None:
    """Text that stands after the last generated token behind a node; None where that is not known.

    Args:
        foreseen: before the node.
    """
    if isinstance(node, Gen):
        return foreseen if node.held else []
    if isinstance(node, Text):
        if node.ids is not None:
            return []
        if foreseen is not None and node.text:
            return [*foreseen, Span(node.text, special=node.special)]
    elif isinstance(node, Select | Fill) or (isinstance(node, Join) and node.mode == "concate_and_append"):
        return None
    return foreseen
