"""Record of a body that is being compiled: its nodes with holes, divided at its decisions by values of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_lite.lang.compilation.compile_symbols import (
    RUN_IT,
    CompileSymbol,
    CompileSymbolSource,
    Deciding,
    kept,
    origin_of,
    unmarked,
)
from sglang_lite.lang.compilation.script import Action, Called, Script
from sglang_lite.lang.state import user_location
from sglang_lite.lang.symbolic.symbols import Symbol
from sglang_lite.program.compiled import Hole, Seed, Step
from sglang_lite.program.nodes import Added, Condition, Decision, Fill, Fork, Node, Path, Text, TurnBegin
from sglang_lite.protocol import UNSET, CompileError, Location, SamplingParams
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.record import Record

if TYPE_CHECKING:
    from sglang_lite.lang.compilation.recording_state import RecordingBranch

MOST_NODES = 100_000  # maximum of a compiled program
_ESCAPED = "ue002"  # a mark, as JSON escapes it


@dataclass(frozen=True, slots=True)
class _Cut:
    """Decision, and the numbers of nodes, holes and seeds that were recorded before it."""

    condition: Condition | None
    after: tuple[Path, ...]
    nodes: tuple[int, ...]  # for each branch
    holes: int
    seeds: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Part of a body between two decisions.

    Attributes:
        added: nodes added to each branch.
        holes, seeds: holes and seeds of these nodes.
        decision: decision after the nodes, without its parts; None if the body has ended.
    """

    added: tuple[Added, ...]
    holes: Sequence[Hole]
    seeds: Sequence[Seed]
    decision: Decision | None


class Recorder:
    """Record of one way through a body that is being compiled.

    Attributes:
        script: actions of the body.
        decisions: log of the body's decisions.
        branches: branches that the body has made, the main one first.
        holes, seeds, held: as in the compiled program.
        unrolled: whether attempts at a typed value are recorded as nodes; else they are held, like everything that
            Python decides on.
        turns: whether the body has turns, whose text a chat template wrote.
        reads: for each read by the body, the number of the action and the path of the branch's last node at that time.
    """

    def __init__(self, decisions: Deciding, *, unrolled: bool) -> None:
        self.script = Script()
        self.decisions, self.unrolled = decisions, unrolled
        decisions.cut, decisions.hold, decisions.record_call = self._cut, self._hold, self.record_call
        self.branches: list[RecordingBranch] = []
        self.holes: list[Hole] = []
        self.seeds: list[Seed] = []
        self.held: Path | None = None
        self.turns = False
        self.reads: list[tuple[int, Path]] = []
        self._count = 0
        self._cuts: list[_Cut] = []

    def add(self, branch: RecordingBranch, node: Any, outer: SamplingParams) -> Any:  # any node; returns the same type
        """Records a node, and returns it in its recorded form.

        Args:
            outer: sampling parameters of the run, which replace those of the node that are symbols.
        """
        self._count += 1
        self.turns |= isinstance(node, TurnBegin)
        if self._count > MOST_NODES:
            told = f"the program has more than {MOST_NODES:,} nodes: compiling it stops here."
            raise CompileError(told, hint="Bound the loop, or run the program without compiling it.", where=node.where)
        if not isinstance(node, Text | Fill):
            node = self._without_blanks(node, (*branch.at, len(branch.nodes)), outer)
        branch.nodes.append(node)
        return node

    def act(self, action: Action) -> int:
        """Records an action of the body. Returns the action's number."""
        actions = self.script.actions
        actions.append(action)
        if len(actions) > 2 * MOST_NODES:
            raise CompileError("the body reads and assigns without an end.", hint=RUN_IT, where=user_location())
        return len(actions) - 1

    def stop_at(self, path: Path) -> None:
        """Notes that the caller's Python decides on the node with this path."""
        self.held = self.held or path

    def _hold(self, origin: CompileSymbolSource) -> Fill:
        """Fill for a value that the caller's Python computes in a run."""
        self.stop_at((len(self.branches[0].nodes),))
        known = [(each.source, each.steps) for each in self.script.holds]
        if (origin.source, origin.steps) not in known:
            known.append((origin.source, origin.steps))
            self.script.holds.append(origin)
        return Fill(hold=known.index((origin.source, origin.steps)))

    def record_call(
        self,
        name: str,
        branch: int | None,
        function: UserValue,
        args: Sequence[UserValue],
        kwargs: Mapping[str, UserValue],
    ) -> CompileSymbol:
        """Records a call of the user's Python that is made in each run. Returns the symbol of its result.

        Args:
            name: name of the call, for errors.
            branch: number of the branch whose state has the method, or None for a function.
            function: function, or name of the method.
        """
        self.stop_at((len(self.branches[0].nodes),))
        call = Called(branch, function, kept(tuple(args)), kept(dict(kwargs)), user_location())
        return CompileSymbol(CompileSymbolSource(f"{name}(…)", None, (self.act(call), ""), "your Python makes it"))

    def _cut(self, condition: Condition | None, after: tuple[Path, ...]) -> None:
        self.script.cuts.append(len(self.script.actions))
        counts = tuple([len(branch.nodes) for branch in self.branches])
        self._cuts.append(_Cut(condition, after, counts, len(self.holes), len(self.seeds)))

    def segments(self) -> Iterator[Segment]:
        """Yields the parts of the body between its decisions, in order."""
        self._cut(None, ())
        before = _Cut(None, (), (), 0, 0)
        for cut in self._cuts:
            starts = (*before.nodes, *(0 for _ in range(len(cut.nodes) - len(before.nodes))))
            added: list[Added] = []
            for branch, first, end in zip(self.branches, starts, cut.nodes):
                forked_before = branch.index < max(len(before.nodes), 1)
                if forked_before and (end > first or not before.nodes):
                    added.append(Added(branch.at, first, self._nodes(branch, first, cut.nodes)))
            decision = None if cut is self._cuts[-1] else Decision((), cut.condition, cut.after)
            holes, seeds = self.holes[before.holes : cut.holes], self.seeds[before.seeds : cut.seeds]
            yield Segment(tuple(added), holes, seeds, decision)
            before = cut

    def _nodes(self, branch: RecordingBranch, first: int, ends: Sequence[int]) -> tuple[Node, ...]:
        """Nodes of a branch from `first` up to a cut, including those of its forks.

        Args:
            ends: number of nodes of each branch at the cut.
        """
        found: list[Node] = []
        for place, node in enumerate(branch.nodes[first : ends[branch.index]], first):
            if isinstance(node, Fork):
                inner = tuple(self._nodes(child, 0, ends) for child in branch.children[place])
                node = Fork(inner, where=node.where)
            found.append(node)
        return tuple(found)

    def _without_blanks(self, node: Any, path: Path, outer: SamplingParams) -> Any:
        """Node with a placeholder for each symbol, for which a hole is recorded."""
        found, where = len(self.holes), node.where

        def walk(thing: Any, at: tuple[Step, ...]) -> Any:
            if isinstance(thing, CompileSymbol):
                fill, *_ = self._arguments(origin_of(thing), where)
                self.holes.append(Hole(path, at, (fill,), whole=True))
                return () if at == ("choices",) else getattr(outer, str(at[-1]), UNSET)
            if isinstance(thing, str):
                return text(thing, at)
            if type(thing) is tuple:
                return tuple(walk(each, (*at, i)) for i, each in enumerate(thing))
            if isinstance(thing, Record):
                every = {name: getattr(thing, name) for name in thing.__struct_fields__ if name != "where"}
                changed = {name: new for name, old in every.items() if (new := walk(old, (*at, name))) is not old}
                return msgspec.structs.replace(thing, **changed) if changed else thing
            return thing

        def text(thing: str, at: tuple[Step, ...]) -> str:
            parts = unmarked(thing)
            if _ESCAPED in thing:
                told = f"{'/'.join(map(str, at))} can't be compiled: an argument is written into JSON."
                raise CompileError(told, hint=RUN_IT, where=where)
            if len(parts) < 2 and not any(isinstance(part, Symbol) for part in parts):
                return thing
            filled: list[str | Fill] = []
            for part in parts:
                filled += self._arguments(origin_of(part), where) if isinstance(part, CompileSymbol) else [str(part)]
            self.holes.append(Hole(path, at, tuple(filled)))
            return "".join(
                [p if isinstance(p, str) else f"\ue002{p.argument}{list(p.steps) or ''}\ue003" for p in filled]
            )

        made = walk(node, ())
        return made if len(self.holes) > found else node

    @staticmethod
    def _arguments(origin: CompileSymbolSource, where: Location | None) -> list[str | Fill]:
        if origin.source is not None:
            told = f"{origin.name} is the value of a node: it can be text, but not a parameter, choice or constraint."
            raise CompileError(told, hint=RUN_IT, where=where)
        return origin.fills(where, special=True)
