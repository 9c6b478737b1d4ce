"""Queue of a branch's nodes that are yet to be played, in order."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from sglang_lite.program.nodes import Gen, GrammarBegin, GrammarEnd, Join, Node, Select, Text
from sglang_lite.protocol import ParameterError, Span
from sglang_lite.runtime.resolved_params import ResolvedParams
from sglang_lite.runtime.schedule_hints import NOTHING_EXPECTED, ExpectedTokens, ScheduleHints
from sglang_lite.runtime.structured_output.base import CompiledGrammar, Matcher

_WAITED_FOR = (Gen, Select, Join, GrammarBegin, GrammarEnd)


@dataclass(eq=False, slots=True)
class QueuedNode:
    """A queued node, with everything prepared for playing it.

    Attributes:
        node: the node.
        grammar: compilation of its constraint, if any.
        params: resolved parameters of a generation, or the error of an invalid one.
        branches: prepared nodes of each branch of a fork.
        text: predicted text between the last generated token and the node, or None if it can't be predicted.
        ids: tokenisation of `text`, if started.
        matcher: matcher of its grammar, made in advance for the next request of the branch.
        expected: tokens that it is expected to add.
    """

    node: Node
    grammar: Future[CompiledGrammar] | None = None
    params: ResolvedParams | ParameterError | None = None
    branches: Sequence[Sequence[QueuedNode]] = ()
    text: list[Span] | None = None
    ids: Future[array[int]] | None = None
    matcher: Future[Matcher] | None = None
    expected: ExpectedTokens = NOTHING_EXPECTED


class BranchQueue:
    """Queue of nodes, each with its place among all nodes that the branch was ever given.

    Args:
        hints: scheduling hints of the branch; kept up to date with the queue.
        dequeued: callback with the number of nodes that leave the queue.

    Attributes:
        count: number of nodes that the branch was ever given.
        predicted_tail: text after the last generated token once all queued nodes are played, or None if unknown.
    """

    def __init__(self, hints: ScheduleHints, dequeued: Callable[[int], None]) -> None:
        self._hints, self._dequeued = hints, dequeued
        self._nodes: deque[tuple[int, QueuedNode]] = deque()
        self.count = 0  # nodes added so far
        self.predicted_tail: list[Span] | None = None

    def __bool__(self) -> bool:
        return bool(self._nodes)

    @property
    def first(self) -> tuple[int, QueuedNode]:
        """Place and entry of the next node."""
        return self._nodes[0]

    @property
    def next_place(self) -> int:
        """Place of the next node; if the queue is empty, the place that the next added node will have."""
        return self._nodes[0][0] if self._nodes else self.count

    @property
    def waits(self) -> bool:
        """True if a queued node takes time to play: a generation, selection or join."""
        return any(isinstance(entry.node, Gen | Select | Join) for _, entry in self._nodes)

    @property
    def next_to_wait(self) -> QueuedNode | None:
        """First queued node that takes time to play or may have to wait, or None."""
        return next((entry for _, entry in self._nodes if isinstance(entry.node, _WAITED_FOR)), None)

    @property
    def next_answer(self) -> int | None:
        """Place of the first queued generation or selection, or None."""
        return next((place for place, entry in self._nodes if isinstance(entry.node, Gen | Select)), None)

    def place(self, count: int = 1) -> int:
        """Assigns places to `count` new nodes; returns the first place."""
        place, self.count = self.count, self.count + count
        return place

    def add(self, place: int, entry: QueuedNode) -> None:
        """Queues a node at its place."""
        self.predicted_tail = _tail_after(entry.node, self.predicted_tail)
        self._nodes.append((place, entry))
        self._hints.expected += entry.expected

    def pop_first(self) -> None:
        """Removes the first node, to be played now."""
        _, entry = self._nodes.popleft()
        self._hints.expected -= entry.expected
        self._dequeued(1)

    def cut(self, end: int) -> list[QueuedNode]:
        """Removes the nodes from the place `end` on, and returns them."""
        gone = list[QueuedNode]()
        while self._nodes and self._nodes[-1][0] >= end:
            _, entry = self._nodes.pop()
            self._hints.expected -= entry.expected
            gone.append(entry)
        if gone:
            self._dequeued(len(gone))
            self.predicted_tail = None
        return gone

    def skip_to(self, place: int) -> None:
        """Removes the nodes before a place."""
        while self._nodes and self._nodes[0][0] < place:
            self.pop_first()

    def has(self, place: int) -> bool:
        """Returns True if the node at a place is queued."""
        return any(at == place for at, _ in self._nodes)

    def clear(self) -> None:
        """Removes all nodes."""
        self._dequeued(len(self._nodes))
        self._nodes.clear()
        self._hints.expected = NOTHING_EXPECTED


def _tail_after(node: Node, predicted_tail: list[Span] | None) -> list[Span] | None:
    """Predicted text between the last generated token and the end of a node, or None if unknown.

    Args:
        node: node to play.
        predicted_tail: prediction before the node.
    """
    if isinstance(node, Gen):
        return predicted_tail if node.held else []
    if isinstance(node, Text):
        if node.ids is not None:
            return []
        if predicted_tail is not None and node.text:
            return [*predicted_tail, Span(node.text, special=node.special)]
    elif isinstance(node, Select) or (isinstance(node, Join) and node.mode == "concate_and_append"):
        return None
    return predicted_tail
