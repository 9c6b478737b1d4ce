"""Graph of a program, as plain data: the nodes that a trace recorded. Independent of the code that
traces, checks or plays programs.

The id of a node is its index in `nodes`. A node that several traced paths ("ways") share is stored
once. A branch is identified by its path: () is the main branch, and (5, 0) is the first branch of
the fork (or the called program) that is node 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

from sglang_lite.errors import Location, ParameterError, short_repr
from sglang_lite.program.nodes import BaseNode, Gen, Node, Path, ScopeEnd, Select, Text
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.prompt import MediaKind
from sglang_lite.protocol.record import Record

MAX_BRANCHINGS: Final = 64  # maximum number of branchings on a traced path
# Step from a value to one of its parts; "other" contains the repr of a key.
AccessStep: TypeAlias = tuple[Literal["attribute", "item", "other"], str | int]


class Value(BaseNode, frozen=True, eq=False):
    """Value of an argument or variable, inserted as text. The only entry in the node's `uses`
    identifies the value.
    """


class Picture(BaseNode, frozen=True, eq=False):
    """Image, video or sound in a graph.

    Attributes:
        source: repr of its source, as given by the body.
        medium: its kind.
    """

    source: str
    medium: MediaKind = "image"


class Call(BaseNode, frozen=True, eq=False):
    """Call of a program that the body runs separately. The program's nodes form a branch.

    Attributes:
        program: name of the program.
    """

    program: str


class Compact(BaseNode, frozen=True, eq=False):
    """Compaction: the text of a branch is replaced by the system turn, a summary of the dropped
    turns, and the last turns. The generation before this node has written the summary.

    Attributes:
        keep: number of turns at the end that are kept.
        turns: number of turns that are dropped.
    """

    keep: int
    turns: int


class Branching(BaseNode, frozen=True, eq=False):
    """Question about a value in the body, such as an `if`. The answer is only known at run time.

    Attributes:
        question: question as written in Python; empty if the question is whether the value is true,
            or which choice it is.
        outcomes: all possible answers.
    """

    question: str
    outcomes: tuple[str, ...]


class Use(Record, frozen=True):
    """Value that a node depends on.

    Attributes:
        name: name of the argument or variable.
        parts: attributes and items that lead from the argument or variable to the value.
        into: purpose: "text", "choices", "constraint", "image", "question", or the name of a
            sampling parameter.
        source: id of the node that makes the value, or None for an argument or a value that the
            body has set.
    """

    name: str
    parts: tuple[AccessStep, ...] = ()
    into: str = "text"
    source: int | None = None

    @property
    def expression(self) -> str:
        """The value as a Python expression."""
        written = {"attribute": ".{}", "item": "[{!r}]", "other": "[{}]"}
        return self.name + "".join(written[kind].format(key) for kind, key in self.parts)


class GraphNode(Record, frozen=True):
    """Node of a graph, with its context.

    Attributes:
        node: the node, without the fields that depend on values (see `uses`).
        path: path of its branch.
        role: role of the open turn, or None.
        scopes: names of the open scopes, outermost first.
        uses: values that the node depends on.
        tools: names of the tools that a generation may call.
        joins: paths of the branches that a join ends.
    """

    node: Node | Value | Picture | Call | Branching | Compact
    path: Path = ()
    role: str | None = None
    scopes: tuple[str, ...] = ()
    uses: tuple[Use, ...] = ()
    tools: tuple[str, ...] = ()
    joins: tuple[Path, ...] = ()

    @property
    def kind(self) -> str:
        """Type name of the node, such as "Text" or "Gen"."""
        return type(self.node).__name__

    @property
    def where(self) -> Location | None:
        """Line of the user's code, or None if unknown."""
        return self.node.where

    @property
    def line(self) -> int:
        """Line number in the user's code, or 0 if unknown."""
        return 0 if self.where is None else self.where.line

    @property
    def name(self) -> str | None:
        """Name of the variable that the node makes, or None if it makes none."""
        return self.node.name if isinstance(self.node, Gen | Select | ScopeEnd) else None


class Problem(Record, frozen=True):
    """Error that ended a traced path.

    Attributes:
        kind: class name of the error.
        message: message of the error.
        hint: suggested correction.
        where: line of the user's code, or None if unknown.
        ours: True if the class belongs to this package.
    """

    kind: str
    message: str
    hint: str = ""
    where: Location | None = None
    ours: bool = False


class Way(Record, frozen=True):
    """Traced path through the body.

    Attributes:
        nodes: ids of the nodes, in the order in which the body added them.
        outcomes: indices of the outcomes of its branchings, in order.
        ended: "returned", "raised", or "cut" if the path was not followed to its end.
        problem: error that the body raised, or None.
        returns: True if the body returned a value.
    """

    nodes: tuple[int, ...]
    outcomes: tuple[int, ...] = ()
    ended: Literal["returned", "raised", "cut"] = "returned"
    problem: Problem | None = None
    returns: bool = False


class Change(Record, frozen=True):
    """Text that differs each time the body is run with the same arguments.

    Attributes:
        node: id of the text's node.
        first, second: text in two traces.
    """

    node: int
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Edge:
    """Edge of the graph.

    Attributes:
        source, target: ids; a source of None stands for the argument in `label`.
        kind: "order" if the target comes next, "data" if the target depends on the source's value.
        label: outcome of a branching, or expression of the value.
    """

    source: int | None
    target: int
    kind: Literal["order", "data"]
    label: str = ""


class GraphRecord(Record, frozen=True):
    """Graph of a program.

    Attributes:
        program: name of the program.
        arguments: names of the arguments that were not given.
        nodes: nodes in the order in which they were first added.
        ways: traced paths through the body; more than one if the trace explored.
        complete: True if `ways` contains every path.
        read: ids of the nodes whose value is read by the body or used by another node.
        changes: texts that differ from run to run.
        unreached: lines that would add a node, but that no path reaches.
    """

    program: str
    arguments: tuple[str, ...]
    nodes: tuple[GraphNode, ...]
    ways: tuple[Way, ...]
    complete: bool = True
    read: tuple[int, ...] = ()
    changes: tuple[Change, ...] = ()
    unreached: tuple[Location, ...] = ()

    def __post_init__(self) -> None:
        indices = range(len(self.nodes))
        for i, node in enumerate(self.nodes):
            for use in node.uses:
                if use.source is not None and use.source not in range(i):
                    raise ParameterError(
                        "nodes", f"node {i} uses node {use.source}, which is not an earlier node."
                    )
            for path in (node.path, *node.joins):
                if len(path) % 2 or any(fork not in range(i) for fork in path[::2]):
                    raise ParameterError(
                        "nodes",
                        f"node {i} has the path {short_repr(path)}, but no fork before it makes that branch.",
                    )
        for way in self.ways:
            if any(node not in indices for node in way.nodes):
                raise ParameterError(
                    "ways", f"a way names a node that does not exist: there are {len(self.nodes)}."
                )
            branchings = [
                each for i in way.nodes if isinstance(each := self.nodes[i].node, Branching)
            ]
            fits = len(branchings) == len(way.outcomes) <= MAX_BRANCHINGS
            if not fits or any(
                o not in range(len(each.outcomes)) for each, o in zip(branchings, way.outcomes)
            ):
                raise ParameterError("ways", "the outcomes of a way do not match its branchings.")
        if not self.ways or any(
            i not in indices for i in (*self.read, *(change.node for change in self.changes))
        ):
            raise ParameterError(
                "nodes", "there is no way, or `read` or `changes` names a node that does not exist."
            )

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Edges in the order of their targets."""
        found = dict.fromkeys(edge for way in self.ways for edge in self._order_edges(way))
        for i, node in enumerate(self.nodes):
            for use in node.uses:
                found[Edge(use.source, i, "data", use.expression)] = None
        return tuple(sorted(found, key=lambda edge: edge.target))

    def _order_edges(self, way: Way) -> Iterator[Edge]:
        last: dict[Path, int] = {}  # last node of each branch
        # preceding branching, its outcome, and the node before it
        branching: tuple[int, str, int | None] | None = None
        before: int | None = None
        outcomes = iter(way.outcomes)
        for i in way.nodes:
            node = self.nodes[i]
            sources = [before]
            if not isinstance(node.node, Branching):
                sources = [last.get(node.path, node.path[-2] if node.path else None)]
                sources += [last[path] for path in node.joins if path in last]
                last[node.path] = i
            if branching is not None:
                yield Edge(branching[0], i, "order", branching[1])
            yield from (
                Edge(source, i, "order")
                for source in sources
                if source is not None
                and (branching is None or source not in (branching[0], branching[2]))
            )
            branching = (
                (i, node.node.outcomes[next(outcomes)], before)
                if isinstance(node.node, Branching)
                else None
            )
            before = i

    def with_arguments(self, row: Mapping[str, UserValue]) -> GraphRecord:
        """Returns the graph with the given arguments' values inserted as text.

        Raises:
            ParameterError: an argument's value lacks an attribute or item that the body reads.
        """
        nodes = [_fill_in_argument(node, row) for node in self.nodes]
        missing = tuple(name for name in self.arguments if name not in row)
        return msgspec.structs.replace(self, nodes=tuple(nodes), arguments=missing)


def _fill_in_argument(node: GraphNode, row: Mapping[str, Any]) -> GraphNode:
    """Returns a text node with the argument's value for a node that stands for one. Returns any
    other node unchanged, images included.
    """
    use = node.uses[0] if isinstance(node.node, Value) else None
    if use is None or use.source is not None or use.name not in row:
        return node
    value = row[use.name]
    for kind, key in use.parts:
        try:
            value = getattr(value, str(key)) if kind == "attribute" else value[key]
        except (AttributeError, LookupError, TypeError) as error:
            raise ParameterError(
                use.name, f"{use.expression} can't be read: {error}.", where=node.where
            ) from None
    text = Text(str(value), special=node.role is None, where=node.where)
    return msgspec.structs.replace(node, node=text, uses=())
