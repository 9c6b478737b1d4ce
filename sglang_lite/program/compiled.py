"""Compiled programs: a program as data whose holes are filled with the arguments of each row.

A compiled program contains no code. The caller's Python (checks, tools, methods of values) is in no node: in its place
the program has a hold, and the process that has that Python plays the program from hold to hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from sglang_lite.errors import ParameterError, shown
from sglang_lite.program.choosing import checked_choices
from sglang_lite.program.control_flow import all_nodes, check_decisions, decided, fill_value
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

MOST_DEPTH: Final = 32  # maximum nesting of lists and objects in an argument
_PARAMETERS: Final = {each.name: each for each in PARAMETERS}
Step: TypeAlias = int | str
Row: TypeAlias = Mapping[str, Any]  # arguments by name
_Make: TypeAlias = "Callable[[Row, int | None], Node]"


class Parameter(Record, frozen=True):
    """Parameter of a program.

    Attributes:
        name: name of the parameter.
        value: default value.
        required: True if it has no default.
    """

    name: str
    value: Any = None
    required: bool = False


class Hole(Record, frozen=True):
    """Place in a node that arguments fill.

    Attributes:
        path: path of the node.
        field: field names and indices that lead from the node to the value.
        parts: texts and arguments that are concatenated; with `whole`, a single argument.
        whole: True if the argument's value is inserted unchanged, not as text.
        part: index of the program's part that contains the node, or -1 for the nodes before the first decision.
    """

    path: Path
    field: tuple[Step, ...]
    parts: tuple[str | Fill, ...]
    whole: bool = False
    part: int = -1


class Seed(Record, frozen=True):
    """Node whose seed is derived from the seed of the run.

    Attributes:
        path: path of the node.
        place: place of the node, from which its seed is derived.
        part: index of the program's part that contains the node, or -1 for the nodes before the first decision.
        attempt: number of draws that were made at this place before.
    """

    path: Path
    place: str
    part: int = -1
    attempt: int = 0


class CompiledProgram(Record, frozen=True):
    """Program whose arguments are data.

    Attributes:
        name: name of the program.
        nodes: nodes of the main branch, up to the first decision. Text of arguments is Fill.
        parameters: parameters of the program.
        holes: other places in nodes that arguments fill.
        seeds: nodes whose seeds are derived from the seed of the run.
        held: path of the first node whose result the caller's Python decides on, or before which it works on a value;
            None if it does neither, so that the program is played as a whole.
        fingerprint: digest of the body, and of everything that it reads.
        template: digest of the chat template with which its turns were written; empty if it has no turns.
        decision, parts: as in Program; the decisions may depend on arguments, too.
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
        compiled: compiled program.

    Raises:
        ParameterError: the path of a hole, a seed or a reference is not that of a suitable node.
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
        # A list, so that every decision is checked.
        self._decides = bool([each for each in decisions if self._by_arguments(each)])
        for name, places in (("holes", self._holes), ("seeds", self._seeds)):
            for _, path in places:
                problem = f"{path!r:.60} is not the path of a node with fields."
                raise ParameterError(name, problem, hint="Compile the program again.")

    def checked(self, row: Row, what: str = "arguments") -> dict[str, UserValue]:
        """Arguments of a row, including defaults.

        Args:
            what: name of the arguments in errors.

        Raises:
            ParameterError: an argument is missing, unknown or not plain data.
        """
        for name, value in row.items():
            if name not in self._parameters:
                problem = f"{self.compiled.name} has no parameter {name!r:.60}."
                names = ", ".join(self._parameters) or "none"
                raise ParameterError(what, problem, hint=f"It has: {names}.")
            if type(value) is not str:
                check_data(value, name)
        found = {**self._defaults, **row}
        if len(found) < len(self._parameters):
            missing = next(name for name in self._parameters if name not in found)
            raise ParameterError(what, f"{self.compiled.name} needs {missing!r}.", hint="Give it by name.")
        return found

    def __call__(self, row: Row, seed: int | None = None) -> Program:
        """Program of a row.

        Args:
            row: arguments, as returned by `checked`.
            seed: seed of the run, or None for random seeds.

        Raises:
            ParameterError: a value is not valid in its place; the error names the node's line.
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

    def node(self, node: Any, part: int, path: Path, row: Row) -> Any:  # returns a node of the same type
        """Node with a row's values in the holes that the program has at its place.

        Args:
            node: node of the same type and fields as the program's.
            part: index of the program's part that contains the node, or -1 for the nodes before the first decision.
            path: path of the node.

        Raises:
            ParameterError: a value is not valid in its place; the error names the node's line.
        """
        return _node_maker(node, self._filled.get((part, path), ()), None)(row, None)

    def _by_arguments(self, decision: Decision | None) -> bool:
        """Returns True if a decision depends on arguments."""
        if decision is None or decision.condition is None:
            return False
        sides = [side for side in (decision.condition.left, decision.condition.right) if isinstance(side, Fill)]
        for side in sides:
            self._check_fill(side)
        return any(side.argument is not None for side in sides)

    def _planned(self, nodes: Sequence[Node], path: Path, first: int, part: int) -> list[tuple[int, _Make]]:
        """Functions that make the nodes that differ from row to row, with the indices of those nodes."""
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
            problem = f"{fill.argument!r:.60} is not a parameter of {self.compiled.name}."
            raise ParameterError(
                "Fill", problem, hint=f"It has: {', '.join(self._parameters) or 'none'}.", where=fill.where
            )
        if fill.node is not None and (argument or fill.node not in self._valued):
            problem = f"{fill.node!r:.60} is not the path of a generation or selection."
            raise ParameterError("Fill", problem, where=fill.where)


def check_data(value: object, name: str, depth: int = MOST_DEPTH) -> None:
    """Raises ParameterError if a value is not None, a bool, a number, a string, or a list or dictionary of these."""
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
        problem = f"{shown(value)} ({kind.__name__}) is not plain data."
        hint = "Give None, a bool, a number, a string, or a list or a dictionary of these, with strings as keys."
        raise ParameterError(name, problem, hint=hint)


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
    return lambda row, seed: Text(str(fill_value(row[argument], fill)), None, special, where=where)


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
            node_seed = reseeded(derived_seed(seed, own.place), own.attempt)
            if isinstance(found, Select):
                found = msgspec.structs.replace(found, seed=node_seed)
            elif isinstance(found.params.seed, Unset):
                found = msgspec.structs.replace(found, params=msgspec.structs.replace(found.params, seed=node_seed))
        made: Node = found
        return made

    return make


def _value(hole: Hole, row: Row) -> Any:
    if not hole.whole:
        return "".join([p if isinstance(p, str) else str(fill_value(row[p.argument or ""], p)) for p in hole.parts])
    (part,) = hole.parts
    assert isinstance(part, Fill)
    value = fill_value(row[part.argument or ""], part)
    if hole.field == ("choices",):
        return checked_choices(value)
    parameter = _PARAMETERS.get(str(hole.field[-1]))
    return value if parameter is None else parameter.read(value)


def _put(thing: Any, field: Sequence[Step], value: Any) -> Any:
    """Copy of a record or tuple in which the value at `field` is replaced."""
    if not field:
        return value
    step, *rest = field
    if isinstance(step, str):
        if isinstance(thing, SamplingParams) and not rest and value is None:
            return thing  # as in gen(): None means the run's value
        return msgspec.structs.replace(thing, **{step: _put(getattr(thing, step), rest, value)})
    return (*thing[:step], _put(thing[step], rest, value), *thing[step + 1 :])


def _check_hole(hole: Hole, node: BaseNode) -> None:
    """Raises ParameterError if the node has no field as named by the hole."""
    thing: Any = node
    for step in hole.field:
        if isinstance(step, str) and isinstance(thing, Record) and step in thing.__struct_fields__ and step != "where":
            thing = getattr(thing, step)
        elif isinstance(step, int) and isinstance(thing, tuple) and 0 <= step < len(thing):
            thing = thing[step]
        else:
            problem = f"a {type(node).__name__} has no {'/'.join(map(str, hole.field)):.80}."
            raise ParameterError("holes", problem, where=node.where)
    if not hole.field or (hole.whole and (len(hole.parts) != 1 or not isinstance(hole.parts[0], Fill))):
        raise ParameterError("holes", "a hole needs a field, and a whole one exactly one argument.", where=node.where)
