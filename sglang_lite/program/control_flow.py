"""Decisions of a program: checks of its parts, and the choice between parts by the values of nodes. Pure functions of
data, so that the player of a program and the reader of its result decide alike."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from sglang_lite.errors import ParameterError, shown
from sglang_lite.program.nodes import Added, Condition, Decision, Fill, Fork, Node, Part, Path, Program, Reader, Scalar
from sglang_lite.protocol.anything import UserValue

# Returns the text of a node (or a list of texts for several samples), or the value of an argument.
ValueOf: TypeAlias = Callable[[Fill], Any]

_NUMBER_ENDS = " \n,;:.)"  # characters that may follow a number: TERMINATORS of constraints/free_numbers.py
_SIGNS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "==": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "in": lambda left, right: left in right, "contains": lambda left, right: right in left,
}  # fmt: skip


def fill_value(value: UserValue, fill: Fill) -> UserValue:
    """Part of a value that a fill refers to.

    Raises:
        ParameterError: the value has no such item, or can't be read as the fill's type.
    """
    for step in fill.steps:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            whose = fill.argument if fill.argument is not None else "node value"
            problem = f"{shown(value)} has no item {step!r:.60}."
            raise ParameterError(str(whose), problem, where=fill.where) from None
    return value if fill.read is None else _read(value, fill.read, fill)


def unfilled(fill: Fill) -> ParameterError:
    """Error for a hole that is played before it was filled."""
    if fill.argument is None:
        problem = "its value comes from the caller's Python. Play the program from hold to hold."
        return ParameterError(f"hold {fill.hold}", problem, where=fill.where)
    return ParameterError(
        fill.argument, "the hole has no value. Fill the compiled program before it is played.", where=fill.where
    )


def _read(text: object, reader: Reader, fill: Fill) -> int | float | bool:
    written = str(text).rstrip(_NUMBER_ENDS).replace(",", "")
    try:
        if reader == "bool":
            return {"true": True, "false": False}[str(text)]
        return int(written) if reader == "int" else float(written)
    except (KeyError, ValueError):
        raise ParameterError(
            "node value", f"{shown(text)} can't be read as {reader}.",
            hint=f"Constrain the generation, as in gen(type={reader}).", where=fill.where,
        ) from None  # fmt: skip


def evaluate(condition: Condition, left: UserValue, right: UserValue) -> bool:
    """Truth value of a condition whose two sides are known.

    Raises:
        ParameterError: the sides can't be compared.
    """
    try:
        return bool(left) if condition.sign == "true" else bool(_SIGNS[condition.sign](left, right))
    except TypeError as error:
        problem = f"{shown(left)} {condition.sign} {shown(right)}: {error}."
        hint = "Compare values of the same type."
        raise ParameterError("condition", problem, hint=hint, where=condition.left.where) from error


def holds(condition: Condition, value: ValueOf) -> bool:
    """Returns True if a condition holds.

    Args:
        value: returns the value of a node or argument.

    Raises:
        ParameterError: the condition is not defined for these values.
    """
    if condition.sign == "readable":
        return _readable(value(condition.left), condition.left)
    sides = [fill_value(value(s), s) if isinstance(s, Fill) else s for s in (condition.left, condition.right)]
    return evaluate(condition, *sides)


def _readable(value: Any, fill: Fill) -> bool:
    try:
        fill_value(value, fill)
    except ParameterError:
        return False
    return True


def needed_nodes(decision: Decision) -> Iterator[Path]:
    """Yields the paths of the nodes whose values a decision needs."""
    if decision.condition is not None:
        for side in (decision.condition.left, decision.condition.right):
            if isinstance(side, Fill) and side.node is not None:
                yield side.node


def check_decisions(program: Program) -> None:
    """Checks the decisions of a program.

    Raises:
        ParameterError: a decision has the wrong number of parts, or names a part that does not exist or is not a later
            one.
    """
    decisions = [program.decision, *(part.decision for part in program.parts)]
    for own, decision in enumerate(decisions, -1):
        if decision is None:
            continue
        if len(decision.parts) != (1 if decision.condition is None else 2):
            raise ParameterError("parts", "a decision needs two parts, or one if it has no condition.")
        if not all(own < part < len(program.parts) for part in decision.parts):
            problem = (
                f"a decision names the parts {list(decision.parts)}. Name later ones of the {len(program.parts)} parts."
            )
            raise ParameterError("parts", problem)


def walked(nodes: Sequence[Node], path: Path = (), first: int = 0) -> Iterator[tuple[Path, Node]]:
    """Yields all nodes of a branch, including those of its forks, with their paths.

    Args:
        path: path of the branch.
        first: index of the first node in the branch.
    """
    for place, node in enumerate(nodes, first):
        own = (*path, place)
        yield own, node
        if isinstance(node, Fork):
            for i, branch in enumerate(node.branches):
                yield from walked(branch, (*own, i))


def all_nodes(nodes: Sequence[Node], parts: Sequence[Part]) -> Iterator[tuple[Path, Node]]:
    """Yields all nodes of a program, including those of its parts, with their paths."""
    yield from walked(nodes)
    for part in parts:
        for each in part.added:
            yield from walked(each.nodes, each.path, each.first)


def with_added(nodes: tuple[Node, ...], added: Iterable[Added]) -> tuple[Node, ...]:
    """Nodes of a main branch, extended by further nodes of its branches."""
    for each in added:
        nodes = _with(nodes, each.path, each.nodes)
    return nodes


def _with(nodes: tuple[Node, ...], path: Path, more: tuple[Node, ...]) -> tuple[Node, ...]:
    if not path:
        return nodes + more
    place, branch, *rest = path
    fork = nodes[place]
    assert isinstance(fork, Fork)
    branches = list(fork.branches)
    branches[branch] = _with(branches[branch], tuple(rest), more)
    fork = msgspec.structs.replace(fork, branches=tuple(branches))
    return (*nodes[:place], fork, *nodes[place + 1 :])


def decided(program: Program, row: Mapping[str, UserValue]) -> Program:
    """Program of a row: decisions that depend on arguments are made, and parts that can't be reached are emptied.

    Raises:
        ParameterError: an argument's value can't be used in its condition; the error names the line.
    """
    parts = list(program.parts)
    for number in reversed(range(len(parts))):  # decisions lead to later parts, which have been decided by then
        more, decision = _decided(parts[number].decision, parts, row)
        parts[number] = Part((*parts[number].added, *more), decision)
    more, decision = _decided(program.decision, parts, row)
    possible, waiting = set[int](), [decision]
    while waiting:
        each = waiting.pop()
        fresh = set(() if each is None else each.parts) - possible
        possible |= fresh
        waiting += [parts[number].decision for number in fresh]
    remaining = [part if number in possible else Part() for number, part in enumerate(parts)]
    return Program(with_added(program.nodes, more), decision, tuple(remaining))


def _decided(
    decision: Decision | None, parts: Sequence[Part], row: Mapping[str, Any]
) -> tuple[tuple[Added, ...], Decision | None]:
    """Result of a decision for a row: nodes to add, and the decision that remains."""
    condition = None if decision is None else decision.condition
    if decision is None or condition is None:
        return (), decision
    left, right = (_of_row(side, row) for side in (condition.left, condition.right))
    if isinstance(left, Fill):
        right = right if isinstance(right, Fill) else _constant(right, condition)
        return (), msgspec.structs.replace(decision, condition=Condition(left, condition.sign, right))
    if isinstance(right, Fill):
        raise ParameterError(
            "condition", "the value of a node must be on the left of its condition.", where=condition.left.where
        )
    part = parts[decision.parts[0 if evaluate(condition, left, right) else 1]]
    return part.added, part.decision


def _of_row(side: Any, row: Mapping[str, Any]) -> Any:
    is_argument = isinstance(side, Fill) and side.argument is not None
    return fill_value(row[side.argument], side) if is_argument else side


def _constant(value: Any, condition: Condition) -> Scalar | tuple[Scalar, ...]:
    """Value in the form of a condition's constant. Raises ParameterError if that is impossible."""
    found: Any = tuple(value) if isinstance(value, list | tuple | dict) else value
    for each in found if isinstance(found, tuple) else (found,):
        if each is not None and type(each) not in (str, int, float, bool):
            raise ParameterError(
                "condition", f"{shown(value)} can't be compared with the value of a node.",
                hint="Compare with a string, a number, a bool, None, or a list of these.", where=condition.left.where,
            )  # fmt: skip
    return found  # type: ignore[no-any-return]  # the value was checked


def node_at(nodes: Sequence[Node], path: Path) -> Any:  # a node, whose type the caller knows
    """Node with a path."""
    found: Any = nodes
    for i, step in enumerate(path):
        found = found[step] if not i % 2 else found.branches[step]
    return found


def played_nodes(program: Program, value: Callable[[Path, UserValue], UserValue]) -> tuple[Node, ...]:
    """Nodes that were played, as in a program without decisions.

    Args:
        value: returns the value of a node, given its path and the node. Raises LookupError if the node has no value.
    """
    nodes = program.nodes

    def among(fill: Fill) -> Any:
        path = fill.node or ()
        return value(path, node_at(nodes, path))

    for _, part in _followed(program.decision, program.parts, among):
        nodes = with_added(nodes, part.added)
    return nodes


def outcomes(decision: Decision | None, parts: Sequence[Part], value: ValueOf) -> tuple[int, ...]:
    """Outcomes of a program's decisions, from the first one on, as far as they are known: 0 if the condition holds, 1
    if not.

    Args:
        value: returns the value of a node. Raises LookupError if the node has no value.
    """
    return tuple([outcome for outcome, _ in _followed(decision, parts, value)])


def _followed(decision: Decision | None, parts: Sequence[Part], value: ValueOf) -> Iterator[tuple[int, Part]]:
    """Yields the outcomes of decisions, with the parts that they lead to, up to the first decision without a known
    value."""
    while decision is not None:
        try:
            outcome = 0 if decision.condition is None or holds(decision.condition, value) else 1
        except (LookupError, ParameterError):  # errors were raised when the program was played
            return
        part = parts[decision.parts[outcome]]
        yield outcome, part
        decision = part.decision
