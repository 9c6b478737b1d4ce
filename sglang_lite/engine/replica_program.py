"""A program at one of several replicas: which one is known when its first question comes, behind the text that leads to
it."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from sglang_lite.engine.replica_chooser import Placement, ReplicaChooser
from sglang_lite.program.nodes import Fork, Gen, GrammarBegin, Node, Pause, Select, Text, Verdict
from sglang_lite.program.nodes import Path as BranchPath
from sglang_lite.protocol import Delta, EngineClosedError, ParameterError, Played, ProgramEvent, ProgramSink, Span
from sglang_lite.runtime.core.gate import Gate
from sglang_lite.runtime.core.request_builder import RequestBuilder
from sglang_lite.runtime.core.submission import check_nodes
from sglang_lite.runtime.requests.scheduled_branch import expected_tokens

if TYPE_CHECKING:
    from sglang_lite.engine.core import OpenProgram


class ProgramLoad:
    """Rows and tokens of a program at its replica: those of its questions that have not been answered.

    Args:
        chooser: chooser that counts them.
        placement: placement of the program.
        builder: builder of its requests.
    """

    def __init__(self, chooser: ReplicaChooser, placement: Placement, builder: RequestBuilder) -> None:
        self._chooser, self._placement, self._builder = chooser, placement, builder
        self._asked: Counter[BranchPath] = Counter()  # questions by branch
        self._lock = threading.Lock()

    def add(self, path: BranchPath, nodes: Sequence[Node]) -> None:
        """Counts new nodes of a branch. Those that a fork brings for its own branches count until the program ends."""
        tokens = sum(self._expected(node) for node in _questions(nodes))
        asked = Counter[BranchPath]({path: sum(isinstance(node, Gen | Select) for node in nodes)})
        for place, node in enumerate(nodes):
            for index, branch in enumerate(node.branches if isinstance(node, Fork) else ()):
                asked[(*path, -1 - place, index)] += sum(1 for _ in _questions(branch))  # no place of a node
        with self._lock:
            before = self._rows
            self._asked.update(+asked)
            self._chooser.count(self._placement, self._rows - before, tokens)

    def passing(self, sink: ProgramSink) -> ProgramSink:
        """Callback that counts answers, and passes all events on to a sink."""

        def tell(event: ProgramEvent) -> None:
            if not isinstance(event, Played):
                self._chooser.ended(self._placement)
            elif not isinstance(event.event, Delta):
                self._answered(event.path[:-1])
            sink(event)

        return tell

    def _answered(self, path: BranchPath) -> None:
        with self._lock:
            if self._asked[path]:
                before, share = self._rows, self._placement.tokens // self._asked.total()
                self._asked[path] -= 1
                self._chooser.count(self._placement, self._rows - before, -share)

    @property
    def _rows(self) -> int:
        """Branches with questions; one for a program without any now, which is there all the same."""
        return max(sum(count > 0 for count in self._asked.values()), 1)

    def _expected(self, node: Gen | Select) -> int:
        try:
            params = self._builder.resolved(node.params) if isinstance(node, Gen) else None
        except ParameterError:  # the node will fail
            return 0
        expected = expected_tokens(node, params, ())
        return expected.text + expected.generated


class ProgramAtReplica:
    """Open program (see `EngineProgram`), whose calls wait until its replica is chosen.

    Args:
        gate: checks of callers.
        sink: callback for the events.
        begin: function that opens the program at a replica, by the spans of text that it begins with.
    """

    def __init__(
        self, gate: Gate, sink: ProgramSink, begin: Callable[[Sequence[Span]], tuple[OpenProgram, ProgramLoad]]
    ) -> None:
        self._gate, self._sink, self._begin = gate, sink, begin
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
                    if any(isinstance(node, Pause | GrammarBegin) for node in nodes) or any(_questions(nodes)):
                        self._place()
                    return
        program, load = self._placed
        load.add(path, nodes)
        program.extend(path, nodes)

    def judge(self, path: BranchPath, place: int, verdict: Verdict) -> None:
        self._gate.check_open()
        self._program().judge(path, place, verdict)

    def drop(self, path: BranchPath) -> None:
        with self._reported():
            self._program().drop(path)

    def expect_pause(self, path: BranchPath, seconds: float) -> None:
        with self._reported():
            self._program().expect_pause(path, seconds)

    def close(self) -> None:
        with self._reported():
            self._program().close()

    def abort(self) -> None:
        with self._reported():
            self._program().abort()

    def _program(self) -> OpenProgram:
        """The program at its replica, which is chosen now if it was not."""
        if self._placed is None:
            with self._lock:
                if self._placed is None:
                    self._place()
        assert self._placed is not None
        return self._placed[0]

    def _place(self) -> None:
        """Begins the program. The caller holds the lock."""
        program, load = self._begin(_beginning([node for path, nodes in self._early if not path for node in nodes]))
        for path, nodes in self._early:
            load.add(path, nodes)
            program.extend(path, nodes)
        self._early.clear()
        self._placed = program, load

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Context of a call that raises nothing: if no replica is there, the program ends with the error."""
        try:
            yield
        except EngineClosedError as error:
            sink, self._sink = self._sink, lambda _: None
            sink(error)


def program_spans(prompt: Sequence[Span], nodes: Sequence[Node]) -> list[Span]:
    """Text that a whole program begins with."""
    return [*prompt, *_beginning(nodes)]


def _beginning(nodes: Sequence[Node]) -> list[Span]:
    """Text before the first node that adds something else."""
    spans: list[Span] = []
    for node in nodes:
        if isinstance(node, Text):
            spans.append(Span(node.text, node.ids, node.special))
        elif isinstance(node, Gen | Select | Pause | Fork):
            break
    return spans


def _questions(nodes: Sequence[Node]) -> Iterator[Gen | Select]:
    """Yields the generations and selections among nodes, and in branches of their forks."""
    for node in nodes:
        if isinstance(node, Gen | Select):
            yield node
        elif isinstance(node, Fork):
            for branch in node.branches:
                yield from _questions(branch)
