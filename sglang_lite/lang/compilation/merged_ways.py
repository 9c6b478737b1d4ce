"""Merging of the ways through a body: their common beginnings are stored once."""

from __future__ import annotations

import msgspec

from sglang_lite.lang.compilation.compile_symbols import OR_RUN_IT
from sglang_lite.lang.compilation.recorder import MOST_NODES, Recorder, Segment
from sglang_lite.lang.compilation.script import Script
from sglang_lite.program.compiled import Hole, Seed
from sglang_lite.program.control_flow import walked
from sglang_lite.program.nodes import Decision, Node, Part, Path
from sglang_lite.protocol import CompileError, Location

MOST_WAYS = 256  # maximum number of ways through a body
_Way = tuple[int, ...]


class MergedWays:
    """Ways through a body, merged into one program. A way is identified by the outcomes of its decisions.

    Attributes:
        scripts: script of each way.
        holes, seeds: holes and seeds of all parts of the program.
        held: path of the first node that the caller's Python decides on, or None.
        turns: whether the program has turns, whose text a chat template wrote.
    """

    def __init__(self) -> None:
        self.scripts: dict[_Way, Script] = {}
        self.holes: list[Hole] = []
        self.seeds: list[Seed] = []
        self.held: Path | None = None
        self.turns = False
        self._segments: dict[_Way, Segment] = {}  # by the outcomes of the decisions before
        self._numbers: dict[_Way, int] = {}
        self._count = 0  # number of nodes

    def take(self, recorder: Recorder, left: int) -> list[_Way]:
        """Adds one way. Returns the beginnings of other ways that branch off from it.

        Args:
            recorder: record of the way.
            left: number of known ways that have not been recorded yet.

        Raises:
            CompileError: the body has too many ways or nodes, or behaves differently when it is run again.
        """
        taken, decisions = tuple(recorder.decisions.taken), recorder.decisions
        self.scripts[taken] = recorder.script
        self.held, self.turns = self.held or recorder.held, self.turns or recorder.turns
        for i, segment in enumerate(recorder.segments()):
            self._keep(taken[:i], segment)
        others = [(*taken[:i], 1) for i in range(len(decisions.ways), len(taken)) if decisions.open[i]]
        if len(self.scripts) + left + len(others) > MOST_WAYS:
            asked = self._segments[others[-1][:-1] if others else ()].decision
            where = None if asked is None or asked.condition is None else asked.condition.left.where
            told = f"there are more than {MOST_WAYS:,} ways through the body."
            raise CompileError(told, hint=f"Decide less often, or bound its loops lower. {OR_RUN_IT}", where=where)
        return others

    def _keep(self, way: _Way, segment: Segment) -> None:
        known = self._segments.get(way)
        if known is not None:
            same = known.added == segment.added and known.decision == segment.decision
            if not same:
                raise CompileError(
                    "the body does something else when it is run again.", where=_first_line(segment),
                    hint=f"Let it depend only on its arguments. {OR_RUN_IT}",
                )  # fmt: skip
            return
        self._segments[way] = segment
        number = self._numbers[way] = len(self._numbers) - 1
        self.holes += [msgspec.structs.replace(hole, part=number) for hole in segment.holes]
        self.seeds += [msgspec.structs.replace(seed, part=number) for seed in segment.seeds]
        self._count += sum(1 for each in segment.added for _ in walked(each.nodes))
        if self._count > MOST_NODES:
            told = f"the ways through the body have more than {MOST_NODES:,} nodes: compiling it stops here."
            raise CompileError(told, hint=f"Bound its loops lower. {OR_RUN_IT}", where=_first_line(segment))

    def program(self) -> tuple[tuple[Node, ...], Decision | None, tuple[Part, ...]]:
        """Nodes of the main branch before the first decision, that decision, and the parts of the program."""
        parts = [Part(segment.added, self._decision(way)) for way, segment in self._segments.items()]
        return parts[0].added[0].nodes, parts[0].decision, tuple(parts[1:])

    def _decision(self, way: _Way) -> Decision | None:
        found = self._segments[way].decision
        if found is None:
            return None
        numbers = [self._numbers[*way, i] for i in range(1 if found.condition is None else 2)]
        return msgspec.structs.replace(found, parts=tuple(numbers))


def _first_line(segment: Segment) -> Location | None:
    nodes = [node for each in segment.added for node in each.nodes]
    return nodes[0].where if nodes else None
