"""The graph of a program, as data: what a trace saw of it. Knows nothing of who traces, checks or plays it.

A node's id is its place in `nodes`; nodes that several ways through the body share are there once. A branch is named by
its path: () is the main one, (5, 0) the first branch of the fork (or the program called) that is node 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import msgspec

from sglang_lite.errors import Location, ParameterError, shown
from sglang_lite.program.nodes import BaseNode, Gen, Node, Path, ScopeEnd, Select, Text
from sglang_lite.protocol.anything import UserValue
from sglang_lite.protocol.record import Record

MOST_BRANCHINGS: Final = 64  # on a way
Part: TypeAlias = tuple[Literal["attribute", "item", "other"], str | int]  # of a value; other: a key as Python shows it


class Value(BaseNode, frozen=True, eq=False):
    """Text of an argument or a variable: the one that the node uses."""


class Picture(BaseNode, frozen=True, eq=False):
    """An image.

    Attributes:
        source: as the body gives it.
    """

    source: str


class Call(BaseNode, frozen=True, eq=False):
    """A program that the body runs by itself; its nodes are a branch."""

    program: str


class Branching(BaseNode, frozen=True, eq=False):
    """A question of the body that a run answers.

    Attributes:
        question: as it is written in Python; empty: whether the value is true, or which choice it is.
        outcomes: all answers.
    """

    question: str
    outcomes: tuple[str, ...]


class Use(Record, frozen=True):
    """A value that a node needs.

    Attributes:
        name: of the argument or variable.
        parts: attributes and items that lead to it from there.
        into: "text", "choices", "constraint", "image", "question", or the name of a parameter.
        source: the node that makes it; None: an argument, or a value that the body has set.
    """

    name: str
    parts: tuple[Part, ...] = ()
    into: str = "text"
    source: int | None = None

    @property
    def expression(self) -> str:
        """The value as Python writes it."""
        written = {"attribute": ".{}", "item": "[{!r}]", "other": "[{}]"}
        return self.name + "".join(written[kind].format(key) for kind, key in self.parts)


class GraphNode(Record, frozen=True):
    """A node, and where it stands.

    Attributes:
        node: what it says. What depends on values is left out of it: see `uses`.
        path: of its branch.
        role: of the turn that is open there.
        scopes: that are open there, outermost first.
        uses: values that it needs.
        tools: names of those that a generation may call.
        joins: paths of the branches that a join ends.
    """

    node: Node | Value | Picture | Call | Branching
    path: Path = ()
    role: str | None = None
    scopes: tuple[str, ...] = ()
    uses: tuple[Use, ...] = ()
    tools: tuple[str, ...] = ()
    joins: tuple[Path, ...] = ()

    @property
    def kind(self) -> str:
        """The kind of the node: "Text", "Gen" …"""
        return type(self.node).__name__

    @property
    def where(self) -> Location | None:
        """The user's line."""
        return self.node.where

    @property
    def name(self) -> str | None:
        """The name of the variable that it makes."""
        return self.node.name if isinstance(self.node, Gen | Select | ScopeEnd) else None


class Problem(Record, frozen=True):
    """An error that ended a way.

    Attributes:
        kind: its class.
        ours: it is one of this package.
    """

    kind: str
    message: str
    hint: str = ""
    where: Location | None = None
    ours: bool = False


class Way(Record, frozen=True):
    """A way through the body.

    Attributes:
        nodes: ids, in the order in which the body has added them.
        outcomes: of the branchings among them.
        ended: "cut": there was more of it than was followed.
        problem: the error that it raised.
        returns: the body has returned something.
    """

    nodes: tuple[int, ...]
    outcomes: tuple[int, ...] = ()
    ended: Literal["returned", "raised", "cut"] = "returned"
    problem: Problem | None = None
    returns: bool = False


class Change(Record, frozen=True):
    """A text that is another one each time the body is run with the same arguments."""

    node: int
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge of the graph.

    Attributes:
        source, target: ids; a source of None is the argument `label`.
        kind: "order": the target comes next; "data": it needs the source's value.
        label: the outcome of a branching, or the value.
    """

    source: int | None
    target: int
    kind: Literal["order", "data"]
    label: str = ""


class GraphRecord(Record, frozen=True):
    """The graph of a program.

    Attributes:
        program: its name.
        arguments: names of those that were not given.
        nodes: in the order in which they were first added.
        ways: through the body; more than one where it was explored.
        complete: there are no other ways.
        read: ids of nodes whose value the body reads, or that a node uses.
        changes: texts that differ from run to run.
        unreached: lines that would add a node and that no way comes to.
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
        known = range(len(self.nodes))
        for i, node in enumerate(self.nodes):
            for use in node.uses:
                if use.source is not None and use.source not in range(i):
                    raise ParameterError("nodes", f"node {i} uses node {use.source}, which is not an earlier node.")
            for path in (node.path, *node.joins):
                if len(path) % 2 or any(fork not in range(i) for fork in path[::2]):
                    raise ParameterError(
                        "nodes", f"node {i} has the path {shown(path)}, but no fork before it makes that branch."
                    )
        for way in self.ways:
            if any(node not in known for node in way.nodes):
                raise ParameterError("ways", f"a way names a node that does not exist: there are {len(self.nodes)}.")
            asked = [each for i in way.nodes if isinstance(each := self.nodes[i].node, Branching)]
            fits = len(asked) == len(way.outcomes) <= MOST_BRANCHINGS
            if not fits or any(o not in range(len(each.outcomes)) for each, o in zip(asked, way.outcomes)):
                raise ParameterError("ways", "the outcomes of a way do not match its branchings.")
        if not self.ways or any(i not in known for i in (*self.read, *(change.node for change in self.changes))):
            raise ParameterError("nodes", "there is no way, or `read` or `changes` names a node that does not exist.")

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Edges by their targets."""
        found = dict.fromkeys(edge for way in self.ways for edge in self._order(way))
        for i, node in enumerate(self.nodes):
            for use in node.uses:
                found[Edge(use.source, i, "data", use.expression)] = None
        return tuple(sorted(found, key=lambda edge: edge.target))

    def _order(self, way: Way) -> Iterator[Edge]:
        last: dict[Path, int] = {}  # of each branch
        asked: tuple[int, str, int | None] | None = None  # the branching just before, its outcome, what was before it
        before: int | None = None
        outcomes = iter(way.outcomes)
        for i in way.nodes:
            node = self.nodes[i]
            sources = [before]
            if not isinstance(node.node, Branching):
                sources = [last.get(node.path, node.path[-2] if node.path else None)]
                sources += [last[path] for path in node.joins if path in last]
                last[node.path] = i
            if asked is not None:
                yield Edge(asked[0], i, "order", asked[1])
            yield from (
                Edge(source, i, "order")
                for source in sources
                if source is not None and (asked is None or source not in (asked[0], asked[2]))
            )
            asked = (i, node.node.outcomes[next(outcomes)], before) if isinstance(node.node, Branching) else None
            before = i

    def filled(self, row: Mapping[str, UserValue]) -> GraphRecord:
        """The graph with the values of arguments in its texts.

        Raises:
            ParameterError: the row has no such argument, or the value no such attribute or item.
        """
        nodes = [_filled(node, row) for node in self.nodes]
        left = tuple(name for name in self.arguments if name not in row)
        return msgspec.structs.replace(self, nodes=tuple(nodes), arguments=left)


def _filled(node: GraphNode, row: Mapping[str, Any]) -> GraphNode:
    """A node with the values of arguments: a value becomes text. (Images stay what they are.)"""
    use = node.uses[0] if isinstance(node.node, Value) else None
    if use is None or use.source is not None or use.name not in row:
        return node
    value = row[use.name]
    for kind, key in use.parts:
        try:
            value = getattr(value, str(key)) if kind == "attribute" else value[key]
        except (AttributeError, LookupError, TypeError) as error:
            raise ParameterError(use.name, f"{use.expression} can't be read: {error}.", where=node.where) from None
    text = Text(str(value), special=node.role is None, where=node.where)
    return msgspec.structs.replace(node, node=text, uses=())
