"""Programs whose arguments are data: one graph with holes, and what fills it for a row.

A compiled program is data alone; nothing of it is executed. What is the caller's Python (checks, tools, methods of
values) is in no node: there the program has a hold, and whoever has that Python plays it from one to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from sglang_lite.errors import ParameterError, shown
from sglang_lite.program.choosing import checked_choices
from sglang_lite.program.control_flow import all_nodes, check_decisions, decided, taken
from sglang_lite.program.nodes import (
    Added,
    BaseNode,
    Decision,
    Fill,
    Fork,
    Gen,
    Node,
    Part,
    Path,
    Program,
    Select,
    Text,
)
from sglang_lite.program.seeds import derived_seed, reseeded
from sglang_lite.protocol import SamplingParams, Unset
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.record import Record
from sglang_lite.protocol.sampling import PARAMETERS

MOST_DEPTH: Final = 32  # of lists and objects in an argument
_PARAMETERS: Final = {each.name: each for each in PARAMETERS}
Step: TypeAlias = int | str
Row: TypeAlias = Mapping[str, Any]  # arguments by name
_Make: TypeAlias = "Callable[[Row, int | None], Node]"


class Parameter(Record, frozen=True):
    """A parameter of a program.

    Attributes:
        value: its default.
        required: it has none.
    """

    name: str
    value: Any = None
    required: bool = False


class Hole(Record, frozen=True):
    """A value in a node that an argument gives.

    Attributes:
        path: of the node.
        field: names and indices from the node to the value.
        parts: text and arguments that make a text; of one argument alone with `whole`, its value as it is.
        part: of the program's parts, the one that has the node; -1: it is among the first nodes.
    """

    path: Path
    field: tuple[Step, ...]
    parts: tuple[str | Fill, ...]
    whole: bool = False
    part: int = -1


class Seed(Record, frozen=True):
    """A node whose seed comes from that of the run.

    Attributes:
        path: of the node.
        place: of the node, as seeds go by it.
        part: as of a hole.
        attempt: of those that were made there before.
    """

    path: Path
    place: str
    part: int = -1
    attempt: int = 0


class CompiledProgram(Record, frozen=True):
    """A program whose arguments are data.

    Attributes:
        name: of the program.
        nodes: of its main branch. Text of arguments is Fill.
        parameters: of the program.
        holes: other values in nodes that arguments give.
        seeds: nodes that get a seed where the run has one.
        held: the path of the first node that the caller's Python decides on, or before which it works on a value; None:
            it has no say, and the program is played as a whole.
        fingerprint: digest of the body, and of all that it reads.
        template: digest of the chat template that its turns were written with; empty where it has no turns.
        decision, parts: as of a Program. Decisions may be by arguments, too.
    """

    name: str
    nodes: tuple[Node, ...]
    parameters: tuple[Parameter, ...] = ()
    holes: tuple[Hole, ...] = ()
    seeds: tuple[Seed, ...] = ()
    held: Path | None = None
    fingerprint: str = ""
    template: str = ""
    decision: Decision | None = None
    parts: tuple[Part, ...] = ()


class Filler:
    """Fills the holes of a compiled program, row by row.

    Args:
        compiled: the program.

    Raises:
        ParameterError: a hole, a seed or a node's reference points at nothing.
    """

    def __init__(self, compiled: CompiledProgram) -> None:
        self.compiled = compiled
        self._parameters = {each.name: each for each in compiled.parameters}
        self._defaults = {each.name: each.value for each in compiled.parameters if not each.required}
        check_decisions(Program(compiled.nodes, compiled.decision, compiled.parts))
        self._holes: dict[tuple[int, Path], list[Hole]] = {}
        for hole in compiled.holes:
            self._holes.setdefault((hole.part, hole.path), []).append(hole)
        self._filled = {place: tuple(each) for place, each in self._holes.items()}
        self._seeds = {(each.part, each.path): each for each in compiled.seeds}
        found = all_nodes(compiled.nodes, compiled.parts)
        self._valued = {path for path, node in found if isinstance(node, Gen | Select)}
        self._plan = self._planned(compiled.nodes, (), 0, -1)
        self._plans = [
            [self._planned(each.nodes, each.path, each.first, number) for each in part.added]
            for number, part in enumerate(compiled.parts)
        ]
        decisions = [compiled.decision, *(part.decision for part in compiled.parts)]
        self._decides = bool([each for each in decisions if self._by_arguments(each)])  # each of them is checked
        for _, path in (*self._holes, *self._seeds):
            raise ParameterError("holes", f"{path!r:.60} is not the path of a node that can have one.")

    def checked(self, row: Row, what: str = "arguments") -> dict[str, UserValue]:
        """The arguments of a row, defaults included.

        Raises:
            ParameterError: one is missing, unknown or no data.
        """
        for name, value in row.items():
            if name not in self._parameters:
                told = f"{self.compiled.name} has no parameter {name!r:.60}."
                known = ", ".join(self._parameters) or "none"
                raise ParameterError(what, told, hint=f"It has: {known}.")
            if type(value) is not str:
                check_data(value, name)
        found = {**self._defaults, **row}
        if len(found) < len(self._parameters):
            missing = next(name for name in self._parameters if name not in found)
            raise ParameterError(what, f"{self.compiled.name} needs {missing!r}.", hint="Give it by name.")
        return found

    def __call__(self, row: Row, seed: int | None = None) -> Program:
        """The program of a row.

        Args:
            row: arguments that were `checked`.
            seed: of the run.

        Raises:
            ParameterError: a value can't be where it is to be, with the node's line.
        """
        compiled = self.compiled
        nodes = tuple(_filled(compiled.nodes, self._plan, row, seed))
        if compiled.decision is None:
            return Program(nodes)
        parts = [
            Part(
                tuple(
                    [Added(e.path, e.first, tuple(_filled(e.nodes, p, row, seed))) for e, p in zip(part.added, plans)]
                ),
                part.decision,
            )
            for part, plans in zip(compiled.parts, self._plans)
        ]
        program = Program(nodes, compiled.decision, tuple(parts))
        return decided(program, row) if self._decides else program

    def node(self, node: Any, part: int, path: Path, row: Row) -> Any:  # another of its type
        """A node with a row's values in the holes that the program has at its place.

        Args:
            node: as its author has it, of the same fields.
            part: as of a hole.

        Raises:
            ParameterError: as when a program is filled.
        """
        return _node_maker(node, self._filled.get((part, path), ()), None)(row, None)

    def _by_arguments(self, decision: Decision | None) -> bool:
        """Tells whether a decision is by arguments."""
        if decision is None or decision.condition is None:
            return False
        sides = [side for side in (decision.condition.left, decision.condition.right) if isinstance(side, Fill)]
        for side in sides:
            self._check_fill(side)
        return any(side.argument is not None for side in sides)

    def _planned(self, nodes: Sequence[Node], path: Path, first: int, part: int) -> list[tuple[int, _Make]]:
        """Makers of the nodes that differ from row to row, by their indices."""
        plan: list[tuple[int, _Make]] = []
        for i, node in enumerate(nodes):
            make = self._maker(node, (*path, first + i), part)
            if make is not None:
                plan.append((i, make))
        return plan

    def _maker(self, node: Node, path: Path, part: int) -> _Make | None:
        if isinstance(node, Fill):
            self._check_fill(node)
            return None if node.argument is None else _text_maker(node)
        if isinstance(node, Fork):
            plans = [self._planned(branch, (*path, i), 0, part) for i, branch in enumerate(node.branches)]
            return _fork_maker(node, plans) if any(plans) else None
        holes, own = self._holes.pop((part, path), []), self._seeds.pop((part, path), None)
        for hole in holes:
            _check_hole(hole, node)
            for each in hole.parts:
                if isinstance(each, Fill):
                    self._check_fill(each, argument=True)
        if own is not None and not isinstance(node, Gen | Select):
            raise ParameterError("seeds", f"{path!r:.60} is the path of a {type(node).__name__}, which has no seed.")
        return _node_maker(node, holes, own) if holes or own is not None else None

    def _check_fill(self, fill: Fill, *, argument: bool = False) -> None:
        if fill.argument is not None and fill.argument not in self._parameters:
            told = f"{fill.argument!r:.60} is not a parameter of {self.compiled.name}."
            raise ParameterError(
                "Fill", told, hint=f"It has: {', '.join(self._parameters) or 'none'}.", where=fill.where
            )
        if fill.node is not None and (argument or fill.node not in self._valued):
            told = f"{fill.node!r:.60} is not the path of a generation or selection."
            raise ParameterError("Fill", told, where=fill.where)


def check_data(value: object, name: str, depth: int = MOST_DEPTH) -> None:
    """Raises ParameterError: a value is not None, a bool, a number, a text, or a list or dictionary of such."""
    kind = type(value)
    if kind in (str, int, float, bool) or value is None:
        return
    if not depth:
        raise ParameterError(name, f"lists and dictionaries nest deeper than {MOST_DEPTH}.", hint="Use fewer levels.")
    if kind is list:
        for item in value:  # type: ignore[attr-defined] # it is a list
            check_data(item, name, depth - 1)
    elif kind is dict and all(type(key) is str for key in value):  # type: ignore[attr-defined] # it is a dictionary
        for item in value.values():  # type: ignore[attr-defined] # as above
            check_data(item, name, depth - 1)
    else:
        told = f"{shown(value)} ({kind.__name__}) is not plain data."
        hint = "Give None, a bool, a number, a string, or a list or a dictionary of these, with strings as keys."
        raise ParameterError(name, told, hint=hint)


def _filled(nodes: Sequence[Node], plan: Sequence[tuple[int, _Make]], row: Row, seed: int | None) -> list[Node]:
    found = list(nodes)
    for place, make in plan:
        found[place] = make(row, seed)
    return found


def _text_maker(fill: Fill) -> _Make:
    argument, special, where = fill.argument, fill.special, fill.where
    assert argument is not None
    if not fill.steps:
        return lambda row, seed: Text(str(row[argument]), None, special, where=where)
    return lambda row, seed: Text(str(taken(row[argument], fill)), None, special, where=where)


def _fork_maker(fork: Fork, plans: Sequence[Sequence[tuple[int, _Make]]]) -> _Make:
    def make(row: Row, seed: int | None) -> Node:
        branches = zip(fork.branches, plans)
        return Fork(tuple([tuple(_filled(nodes, plan, row, seed)) for nodes, plan in branches]), where=fork.where)

    return make


def _node_maker(node: Any, holes: Sequence[Hole], own: Seed | None) -> _Make:
    def make(row: Row, seed: int | None) -> Node:
        found = node
        try:
            for hole in holes:
                found = _put(found, hole.field, _value(hole, row))
        except ParameterError as error:
            error.where = error.where or node.where
            raise
        except (TypeError, ValueError) as error:
            raise ParameterError(str(hole.field[-1]), f"{error}.", where=node.where) from error
        if own is not None and seed is not None:
            drawn = reseeded(derived_seed(seed, own.place), own.attempt)
            if isinstance(found, Select):
                found = msgspec.structs.replace(found, seed=drawn)
            elif isinstance(found.params.seed, Unset):
                found = msgspec.structs.replace(found, params=msgspec.structs.replace(found.params, seed=drawn))
        made: Node = found
        return made

    return make


def _value(hole: Hole, row: Row) -> Any:
    if not hole.whole:
        return "".join([p if isinstance(p, str) else str(taken(row[p.argument or ""], p)) for p in hole.parts])
    (part,) = hole.parts
    assert isinstance(part, Fill)
    value = taken(row[part.argument or ""], part)
    if hole.field == ("choices",):
        return checked_choices(value)
    parameter = _PARAMETERS.get(str(hole.field[-1]))
    return value if parameter is None else parameter.read(value)


def _put(thing: Any, field: Sequence[Step], value: Any) -> Any:
    """A record, or a tuple in it, with another value somewhere inside."""
    if not field:
        return value
    step, *rest = field
    if isinstance(step, str):
        if isinstance(thing, SamplingParams) and not rest and value is None:
            return thing  # as in gen(): None comes from the run
        return msgspec.structs.replace(thing, **{step: _put(getattr(thing, step), rest, value)})
    return (*thing[:step], _put(thing[step], rest, value), *thing[step + 1 :])


def _check_hole(hole: Hole, node: BaseNode) -> None:
    """Raises ParameterError: a hole's field is not there."""
    thing: Any = node
    for step in hole.field:
        if isinstance(step, str) and isinstance(thing, Record) and step in thing.__struct_fields__ and step != "where":
            thing = getattr(thing, step)
        elif isinstance(step, int) and isinstance(thing, tuple) and 0 <= step < len(thing):
            thing = thing[step]
        else:
            told = f"a {type(node).__name__} has no {'/'.join(map(str, hole.field)):.80}."
            raise ParameterError("holes", told, where=node.where)
    if not hole.field or (hole.whole and (len(hole.parts) != 1 or not isinstance(hole.parts[0], Fill))):
        raise ParameterError("holes", "a hole needs a field, and a whole one exactly one argument.", where=node.where)
