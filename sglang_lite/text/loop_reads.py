"""Finds what the bodies of a template's loops read, and rewrites the loops so that they can
remember what they wrote (`loop_memo.py`).

Loops stay as they are if their reads can't be determined, or if they may change anything outside
themselves.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeGuard

from jinja2 import nodes

# A filter. Templates can name filters in texts, which `map` takes, but not this one.
REMEMBER = f"remember iteration {secrets.token_hex(16)}"
_LENGTH_DEPENDENT = frozenset(
    {"length", "revindex", "revindex0"}
)  # these depend on the list's length
_POSITIONS = _LENGTH_DEPENDENT | {"index", "index0", "first", "last", "previtem", "nextitem"}
# A body of other nodes may change something outside itself.
_PLAIN_NODES = (
    nodes.Assign, nodes.BinExpr, nodes.Call, nodes.Compare, nodes.Concat, nodes.CondExpr,
    nodes.Dict, nodes.FilterBlock, nodes.Filter, nodes.For, nodes.Getattr, nodes.Getitem, nodes.If, nodes.Keyword,
    nodes.List, nodes.Literal, nodes.Name, nodes.Operand, nodes.Output, nodes.Pair, nodes.Scope, nodes.Slice,
    nodes.TemplateData, nodes.Test, nodes.Tuple, nodes.UnaryExpr,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Position:
    """Index into a list, computed from the place of the iteration: `by_index` times its index from
    0, plus `by_length` times the number of items, plus `constant`.
    """

    by_index: int
    by_length: int
    constant: int

    def compute(self, index: int, length: int) -> int:
        return self.by_index * index + self.by_length * length + self.constant


_NUMBERS = {
    "index0": Position(1, 0, 0),
    "index": Position(1, 0, 1),
    "length": Position(0, 1, 0),
    "revindex": Position(-1, 1, 0),
    "revindex0": Position(-1, 1, -1),
}


@dataclass(frozen=True, slots=True)
class LoopReads:
    """What a loop reads besides its items and their indices.

    Attributes:
        constants: name of each value that doesn't change during the loop; "" for attributes.
        lists: names of the lists whose items are read.
        neighbours: these items, each as an index into `lists` and a position.
        last, next, length: whether iterations read `loop.last`, the next item, and the number of
            items.
    """

    constants: tuple[str, ...]
    lists: tuple[str, ...]
    neighbours: tuple[tuple[int, Position], ...]
    last: bool
    next: bool
    length: bool


def rewrite_loops(template: nodes.Template, first: int = 0) -> list[LoopReads]:
    """Rewrites the outer loops of a template so that they remember their iterations. A loop passes
    its list to the environment's `start_loop`, with the values that the loop reads. An iteration
    executes the body if `is_new_iteration` returns True. The filter REMEMBER gets what the body has
    written, and returns the text to write.

    Args:
        first: number of the first loop that is rewritten.

    Returns:
        What each rewritten loop reads. `start_loop` gets the values of `lists` and `constants`.
    """
    rewriter = _LoopRewriter(template, first)
    rewriter.rewrite_all()
    return rewriter.loops


class _UnknownReadsError(Exception):
    """Raised for a body that may read anything, or change something outside itself."""


class _LoopRewriter:
    """Rewrites a template's loops outside macros and blocks, whose texts depend on their callers.

    Attributes:
        loops: what each rewritten loop reads.
    """

    def __init__(self, template: nodes.Template, first: int) -> None:
        self.loops: list[LoopReads] = []
        self._first = first
        self._template = template
        self._macros = {macro.name for macro in template.find_all(nodes.Macro)}
        self._namespaces = frozenset[str]()  # those that are certain to exist
        self._set = _names_set([template])
        self._others = frozenset(
            name
            for assigned in template.find_all(nodes.Assign)
            if not _calls_namespace(assigned.node)
            for name in _names_set([assigned.target])
        ) | _names_set([block.target for block in template.find_all(nodes.AssignBlock)])

    def rewrite_all(self) -> None:
        for statement in self._template.body:
            self._rewrite(statement)
            if isinstance(statement, nodes.Assign) and _calls_namespace(statement.node):
                self._namespaces |= _names_set([statement]) - self._others

    def _rewrite(self, statement: nodes.Node) -> None:
        if isinstance(statement, nodes.If):
            for inner in (*statement.body, *statement.elif_, *statement.else_):
                self._rewrite(inner)
        elif isinstance(statement, nodes.For) and not statement.recursive and not statement.test:
            with suppress(_UnknownReadsError):
                self._rewrite_loop(statement)

    def _rewrite_loop(self, loop: nodes.For) -> None:
        lists = _list_names(loop.iter)
        if "messages" not in self._set:
            lists |= {"messages"}
        reader = _BodyReader(
            lists=lists,
            namespaces=self._namespaces - _names_set(loop.body),
            macros=self._macros,
        )
        found = {
            repr(read): read
            for statement in loop.body
            for read in reader.iterate_reads(statement, None)
        }
        targets = _names_set([loop.target])
        read = _ReadCollector()
        for each in found.values():
            read.add(each, targets)
        number = self._first + len(self.loops)
        self.loops.append(read.collect())
        names = [nodes.Name(name, "load") for name in read.lists]
        start = nodes.EnvironmentAttribute("start_loop")
        given = [nodes.Const(number), loop.iter, *names, *read.constants]
        loop.iter = nodes.Call(start, given, [], None, None)
        ask = nodes.EnvironmentAttribute("is_new_iteration")
        here = [nodes.Const(number), nodes.Name("loop", "load")]
        is_new = nodes.Call(ask, here, [], None, None)
        remember = nodes.Filter(None, REMEMBER, [], [], None, None)
        loop.body = [nodes.FilterBlock([nodes.If(is_new, loop.body, [], [])], remember)]


class _ReadCollector:
    """Collects the reads of a loop's body by their kind."""

    def __init__(self) -> None:
        self.constants: list[nodes.Expr] = []
        self.lists: list[str] = []
        self._neighbours: list[tuple[int, Position]] = []
        self._attributes: set[str] = set()

    def add(self, read: nodes.Expr, targets: Set[str]) -> None:
        """Adds a read.

        Args:
            targets: names that the loop gives to its items.
        """
        if isinstance(read, nodes.Getitem):
            assert isinstance(read.node, nodes.Name)
            if read.node.name not in self.lists:
                self.lists.append(read.node.name)
            number = self.lists.index(read.node.name)
            self._neighbours.append((number, _read_position(read.arg)))
        elif isinstance(read, nodes.Getattr) and read.node == nodes.Name("loop", "load"):
            self._attributes.add(read.attr)
        elif not isinstance(read, nodes.Name) or read.name not in targets:
            self.constants.append(read)

    def collect(self) -> LoopReads:
        names = (each.name if isinstance(each, nodes.Name) else "" for each in self.constants)
        by_length = any(position.by_length for _, position in self._neighbours)
        return LoopReads(
            tuple(names),
            tuple(self.lists),
            tuple(self._neighbours),
            last="last" in self._attributes,
            next="nextitem" in self._attributes,
            length=by_length or not _LENGTH_DEPENDENT.isdisjoint(self._attributes),
        )


@dataclass(frozen=True, slots=True)
class _BodyReader:
    """Finds what the body of a loop reads.

    Attributes:
        lists: names of lists that may be read only at a position.
        namespaces: names of namespaces that exist before the loop.
        macros: names of macros, which may read anything.
    """

    lists: frozenset[str]
    namespaces: frozenset[str]
    macros: Set[str]

    def iterate_reads(self, node: nodes.Node, bound: frozenset[str] | None) -> Iterator[nodes.Expr]:
        """Yields the expressions on which the text of the body depends.

        Args:
            node: a node of the body.
            bound: items of the loops inside the body that are around the node; None outside them.

        Raises:
            _UnknownReadsError: see there.
        """
        if not isinstance(node, _PLAIN_NODES):
            raise _UnknownReadsError
        if isinstance(node, nodes.Test) and node.name == "sameas":
            raise _UnknownReadsError
        if isinstance(node, nodes.For):
            inside = (bound or frozenset()) | _names_set([node.target])
            for part in (node.iter, *node.else_):
                yield from self.iterate_reads(part, bound)
            for part in (*filter(None, [node.test]), *node.body):
                yield from self.iterate_reads(part, inside)
        elif bound is None and self._is_one_read(node):
            yield node
        elif isinstance(node, nodes.Name):
            # inside another loop, `loop` is that one
            if node.name == "loop" or node.name in self.lists or node.name in self.macros:
                raise _UnknownReadsError
            if node.ctx == "load" and node.name not in (bound or ()):
                yield node
        else:
            for child in node.iter_child_nodes():
                yield from self.iterate_reads(child, bound)

    def _is_one_read(self, node: nodes.Node) -> TypeGuard[nodes.Expr]:
        """Returns True for an item of a list, or an attribute of the loop or of a namespace."""
        if isinstance(node, nodes.Getitem) and isinstance(node.node, nodes.Name):
            return node.node.name in self.lists and _is_position(node.arg)
        if not isinstance(node, nodes.Getattr) or not isinstance(node.node, nodes.Name):
            return False
        if node.node.name == "loop":
            return node.attr in _POSITIONS
        return node.node.name in self.namespaces


def _names_set(outer: Sequence[nodes.Node]) -> frozenset[str]:
    """Returns the names that nodes set."""
    found = set[str]()
    stack = list(outer)
    while stack:
        node = stack.pop()
        if isinstance(node, nodes.Name) and node.ctx != "load":
            found.add(node.name)
        stack.extend(node.iter_child_nodes())
    return frozenset(found)


def _list_names(iterated: nodes.Node) -> frozenset[str]:
    """Returns the name of the list that a loop goes through, whole or a slice of it."""
    if isinstance(iterated, nodes.Getitem) and isinstance(iterated.arg, nodes.Slice):
        iterated = iterated.node
    return frozenset({iterated.name} if isinstance(iterated, nodes.Name) else ())


def _is_position(node: nodes.Node) -> bool:
    """Returns True if an index is computed from the loop's position and constants alone."""
    if isinstance(node, nodes.Add | nodes.Sub):
        return _is_position(node.left) and _is_position(node.right)
    if isinstance(node, nodes.Const):
        return type(node.value) is int
    return (
        isinstance(node, nodes.Getattr)
        and node.node == nodes.Name("loop", "load")
        and node.attr in _NUMBERS
    )


def _read_position(node: nodes.Node) -> Position:
    """Converts an index for which `_is_position` returns True."""
    if isinstance(node, nodes.BinExpr):
        left = _read_position(node.left)
        right = _read_position(node.right)
        sign = 1 if isinstance(node, nodes.Add) else -1
        return Position(
            left.by_index + sign * right.by_index,
            left.by_length + sign * right.by_length,
            left.constant + sign * right.constant,
        )
    if isinstance(node, nodes.Const):
        return Position(0, 0, node.value)
    assert isinstance(node, nodes.Getattr)
    return _NUMBERS[node.attr]


def _calls_namespace(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Call) and node.node == nodes.Name("namespace", "load")
