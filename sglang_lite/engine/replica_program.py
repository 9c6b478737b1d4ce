"""Program that runs on one of several replicas. The replica is chosen when the program asks for its
first generation or selection, because the text before it is then known.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from sglang_lite.engine.replica_chooser import Placement, ReplicaChooser
from sglang_lite.program.nodes import Fork, Gen, GrammarBegin, Node, Pause, Select, Text, Verdict
from sglang_lite.program.nodes import Path as BranchPath
from sglang_lite.protocol import (
    Delta,
    EngineClosedError,
    ParameterError,
    Played,
    ProgramEvent,
    ProgramSink,
    Span,
)
from sglang_lite.runtime.core.gate import Gate
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.core.submission import check_nodes
from sglang_lite.runtime.requests.scheduled_branch import estimate_node_tokens

if TYPE_CHECKING:
    from sglang_lite.engine.core import OpenProgram


@dataclass(frozen=True, slots=True)
class Coming:
    """Branches of a fork that have not asked for a generation or selection yet.

    Attributes:
        branches: number of these branches.
        tokens: number of tokens that each is expected to add: as many as the program's first
            generation or selection.
    """

    branches: int = 0
    tokens: int = 0


# nodes of branches, before the program is placed
Early: TypeAlias = Sequence[tuple[BranchPath, Sequence[Node]]]


def estimate_forked_load(early: Early, builder: RequestBuilder) -> Coming:
    """Estimates the load of the branches that a program's first nodes fork. They count before they
    ask for anything: if many programs start together, one replica would otherwise receive too many
    of them.
    """
    nodes = [node for _, nodes in early for node in nodes]
    forked = sum(
        len(node.branches) for node in nodes if isinstance(node, Fork) and not any(node.branches)
    )
    first = next(_iterate_gens_and_selects(nodes), None)
    return Coming(forked, 0 if first is None else _estimate_added_tokens(first, builder))


class ProgramLoad:
    """Load that a program adds to its replica, in rows and tokens. It includes unanswered
    generations and selections, and branches that have not asked for any yet.

    Args:
        chooser: chooser that counts the load.
        placement: placement of the program, which already has the rows and tokens of `coming`.
        builder: builder of the program's requests.
        coming: branches that have not asked for a generation or selection when the program is
            placed.
    """

    def __init__(
        self,
        chooser: ReplicaChooser,
        placement: Placement,
        builder: RequestBuilder,
        coming: Coming | None = None,
    ) -> None:
        self._chooser = chooser
        self._placement = placement
        self._builder = builder
        self._coming = coming or Coming()
        self._asked: Counter[BranchPath] = Counter()  # questions by branch
        self._lock = threading.Lock()

    def add_nodes(self, path: BranchPath, nodes: Sequence[Node]) -> None:
        """Adds a branch's new nodes to the load. Generations and selections listed inside a fork
        count until the program ends, even after they are answered.
        """
        tokens = sum(self._expected_tokens_of(node) for node in _iterate_gens_and_selects(nodes))
        asked = Counter[BranchPath]({path: sum(isinstance(node, Gen | Select) for node in nodes)})
        for place, node in enumerate(nodes):
            for index, branch in enumerate(node.branches if isinstance(node, Fork) else ()):
                # negative, so that it is not the place of any node
                asked[(*path, -1 - place, index)] += sum(
                    1 for _ in _iterate_gens_and_selects(branch)
                )
        with self._lock:
            before = self._expected_rows
            if path and +asked and path not in self._asked and self._coming.branches:
                self._coming = replace(self._coming, branches=self._coming.branches - 1)
                tokens -= self._coming.tokens
            self._asked.update(+asked)
            self._chooser.adjust(self._placement, self._expected_rows - before, tokens)

    def make_counting_sink(self, sink: ProgramSink) -> ProgramSink:
        """Wraps a sink in a callback that counts answers and passes every event on."""

        def count_and_forward_event(event: ProgramEvent) -> None:
            if not isinstance(event, Played):
                self._chooser.forget_placement(self._placement)
            elif not isinstance(event.event, Delta):
                self._mark_answered(event.path[:-1])
            sink(event)

        return count_and_forward_event

    def _mark_answered(self, path: BranchPath) -> None:
        with self._lock:
            if self._asked[path]:
                before = self._expected_rows
                share = self._placement.tokens // self._asked.total()
                self._asked[path] -= 1
                self._chooser.adjust(self._placement, self._expected_rows - before, -share)

    @property
    def _expected_rows(self) -> int:
        """Number of branches that have an unanswered generation or selection, or have not asked for
        one yet. At least 1.
        """
        return max(sum(count > 0 for count in self._asked.values()), 1) + self._coming.branches

    def _expected_tokens_of(self, node: Gen | Select) -> int:
        return _estimate_added_tokens(node, self._builder)


class ProgramAtReplica:
    """Open program (see `EngineProgram`) on one of several replicas. Its first nodes are kept here
    until a replica is chosen.

    Args:
        gate: checks that the engine is open and that the caller may wait.
        sink: callback for the events.
        begin: function that opens the program at a replica, given the program's opening spans of
            text and its first nodes.
    """

    def __init__(
        self,
        gate: Gate,
        sink: ProgramSink,
        begin: Callable[[Sequence[Span], Early], tuple[OpenProgram, ProgramLoad]],
    ) -> None:
        self._gate = gate
        self._sink = sink
        self._begin = begin
        self._early: list[tuple[BranchPath, Sequence[Node]]] = []
        self._lock = threading.Lock()  # held while calls wait
        self._placed: tuple[OpenProgram, ProgramLoad] | None = None

    def extend(self, path: BranchPath, nodes: Sequence[Node]) -> None:
        self._gate.check_open()
        check_nodes(nodes, path)
        if self._placed is None:
            with self._lock:
                if self._placed is None:
                    self._early.append((path, tuple(nodes)))
                    if any(isinstance(node, Pause | GrammarBegin) for node in nodes) or any(
                        _iterate_gens_and_selects(nodes)
                    ):
                        self._open_at_replica()
                    return
        program, load = self._placed
        load.add_nodes(path, nodes)
        program.extend(path, nodes)

    def judge(self, path: BranchPath, place: int, verdict: Verdict) -> None:
        self._gate.check_open()
        self._ensure_program_opened().judge(path, place, verdict)

    def drop_branch(self, path: BranchPath) -> None:
        with self._report_closed_engine():
            self._ensure_program_opened().drop_branch(path)

    def expect_pause(self, path: BranchPath, seconds: float) -> None:
        with self._report_closed_engine():
            self._ensure_program_opened().expect_pause(path, seconds)

    def wind_down(self) -> None:
        with self._report_closed_engine():
            self._ensure_program_opened().wind_down()

    def close(self) -> None:
        with self._report_closed_engine():
            self._ensure_program_opened().close()

    def abort(self) -> None:
        with self._report_closed_engine():
            self._ensure_program_opened().abort()

    def _ensure_program_opened(self) -> OpenProgram:
        """Returns the program at its replica. Chooses the replica first if that has not happened
        yet.
        """
        if self._placed is None:
            with self._lock:
                if self._placed is None:
                    self._open_at_replica()
        assert self._placed is not None
        return self._placed[0]

    def _open_at_replica(self) -> None:
        """Opens the program at a replica. The caller holds the lock."""
        spans = _spans_before_first_answer(
            [node for path, nodes in self._early if not path for node in nodes]
        )
        program, load = self._begin(spans, self._early)
        for path, nodes in self._early:
            load.add_nodes(path, nodes)
            program.extend(path, nodes)
        self._early.clear()
        self._placed = program, load

    @contextlib.contextmanager
    def _report_closed_engine(self) -> Iterator[None]:
        """Catches an EngineClosedError from the `with` block and reports it to the sink."""
        try:
            yield
        except EngineClosedError as error:
            sink = self._sink
            self._sink = lambda _: None
            sink(error)


def collect_opening_spans(prompt: Sequence[Span], nodes: Sequence[Node]) -> list[Span]:
    """Returns the text that a program begins with: its prompt, and the text before its first
    generation, selection, pause or fork.
    """
    return [*prompt, *_spans_before_first_answer(nodes)]


def _spans_before_first_answer(nodes: Sequence[Node]) -> list[Span]:
    """Returns the text before the first generation, selection, pause or fork."""
    spans: list[Span] = []
    for node in nodes:
        if isinstance(node, Text):
            spans.append(Span(node.text, node.ids, node.special))
        elif isinstance(node, Gen | Select | Pause | Fork):
            break
    return spans


def _estimate_added_tokens(node: Gen | Select, builder: RequestBuilder) -> int:
    """Estimates how many tokens a generation or selection will add."""
    try:
        params = builder.resolve_with_defaults(node.params) if isinstance(node, Gen) else None
    except ParameterError:  # the node will fail
        return 0
    expected = estimate_node_tokens(node, params, ())
    return expected.text + expected.generated


def _iterate_gens_and_selects(nodes: Sequence[Node]) -> Iterator[Gen | Select]:
    """Yields the generations and selections among nodes, including those in the branches of forks."""
    for node in nodes:
        if isinstance(node, Gen | Select):
            yield node
        elif isinstance(node, Fork):
            for branch in node.branches:
                yield from _iterate_gens_and_selects(branch)
