"""Remembers what a template's loops write, so that a growing conversation renders only its new
messages.

What an iteration writes depends on what its body reads: the item, the loop's position, neighbours
(`messages[loop.index0 - 1]`) and variables. `memoize_loops` finds these expressions and compiles a
loop to compute them first. If their values have been met before, the text of that time is written,
and the body is skipped. Loops whose bodies may read anything else, or change anything outside
themselves, stay as they are.

Values are compared by their bytes in the format of `marshal`, because equal values can be written
differently (1, 1.0 and true; dictionaries in another order). Its version 2 writes equal bytes for
the same plain data, and refuses everything else.
"""

from __future__ import annotations

import hashlib
import marshal
import secrets
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeGuard

from jinja2 import nodes
from jinja2.runtime import Undefined

from sglang_lite.protocol.anything import UserValue

# A filter. Templates can name filters in texts, which `map` takes, but not this one.
REMEMBER = f"remember iteration {secrets.token_hex(16)}"
_MAX_ENTRY = 16_384  # characters of what an iteration read and wrote
_MAX_READ_ITEMS = 300  # values in what an iteration read
_MAX_VARIABLE_CHARS = 1_000_000
_MAX_VARIABLE_ITEMS = 50_000
_ENTRY_OVERHEAD = 300  # bytes
_MAX_SIZE = 16_777_216  # of all entries; then all are forgotten
_PURE_FUNCTIONS = ("dict", "raise_exception", "range")
_NUMBERS = frozenset({"length", "index", "index0", "revindex", "revindex0"})
_POSITIONS = _NUMBERS | {"first", "last", "previtem", "nextitem"}
# A body of other nodes may change something outside itself.
_PLAIN_NODES = (
    nodes.Assign, nodes.BinExpr, nodes.Call, nodes.Compare, nodes.Concat, nodes.CondExpr,
    nodes.Dict, nodes.FilterBlock, nodes.Filter, nodes.For, nodes.Getattr, nodes.Getitem, nodes.If, nodes.Keyword,
    nodes.List, nodes.Literal, nodes.Name, nodes.Operand, nodes.Output, nodes.Pair, nodes.Scope, nodes.Slice,
    nodes.TemplateData, nodes.Test, nodes.Tuple, nodes.UnaryExpr,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Remembered:
    """What an iteration wrote.

    Attributes:
        steps, chars: work that it counted.
    """

    text: str
    steps: int
    chars: int


@dataclass(frozen=True, slots=True)
class Iteration:
    """Iteration that is being executed.

    Attributes:
        key: what it reads, or None if its text can't be remembered.
        steps, chars: work of the rendering before it.
    """

    key: bytes | None
    steps: int
    chars: int


class LoopMemo:
    """Texts of iterations, by what they read.

    Args:
        functions: functions of all templates, by name.
    """

    def __init__(self, functions: Mapping[str, UserValue]) -> None:
        self._pure = {name: functions[name] for name in _PURE_FUNCTIONS if name in functions}
        self._texts: dict[bytes, Remembered] = {}
        self._size = 0

    def find(self, key: bytes) -> Remembered | None:
        return self._texts.get(key)

    def add(self, key: bytes, found: Remembered) -> None:
        if len(found.text) > _MAX_ENTRY:
            return
        size = _ENTRY_OVERHEAD + len(key) + 4 * len(found.text)
        if self._size + size > _MAX_SIZE:
            self._texts.clear()
            self._size = 0
        self._texts[key] = found
        self._size += size

    def digest_variables(
        self, loop: int, names: tuple[str, ...], values: tuple[UserValue, ...]
    ) -> PlainBytes:
        """Writes the variables that a loop reads and no statement sets, as a digest."""
        functions = tuple(
            name
            for name, value in zip(names, values)
            if name in self._pure and value is self._pure[name]
        )
        plain = tuple(None if name in functions else value for name, value in zip(names, values))
        undefined = tuple(i for i, value in enumerate(plain) if isinstance(value, Undefined))
        plain = tuple(None if i in undefined else value for i, value in enumerate(plain))
        whole = (loop, functions, undefined, plain)
        written = _write_value(whole, _MAX_VARIABLE_CHARS, _MAX_VARIABLE_ITEMS)
        if written.data is None:
            return written
        return PlainBytes(hashlib.blake2b(written.data, digest_size=16).digest(), written.items)


@dataclass(frozen=True, slots=True)
class PlainBytes:
    """Values written as bytes.

    Attributes:
        data: the bytes, or None if the values are not plain data or too large.
        items: number of values that were looked at, with those inside others.
        too_many: whether there are too many of them.
    """

    data: bytes | None
    items: int
    too_many: bool = False


class ReadWriter:
    """Writes what the iterations of one rendering read. Each list or dictionary is written once,
    because neighbouring iterations read the same ones.
    """

    def __init__(self) -> None:
        # by the value's id, with the value, so that its id is not reused
        self._known: dict[int, tuple[object, PlainBytes]] = {}

    def write(self, values: Sequence[UserValue]) -> PlainBytes:
        """Writes values as bytes that differ if a template could write the values differently."""
        pieces = list[bytes]()
        items = size = 0
        for value in values:
            kind = type(value)
            if kind is bool or (kind is int and -_SMALL < value < _SMALL):
                pieces.append(marshal.dumps(value, 2))
                continue
            if isinstance(value, Undefined):
                pieces.append(_UNDEFINED)
                continue
            known = self._known.get(id(value))
            if known is not None:
                written = known[1]
            else:
                written = _write_value(value, _MAX_ENTRY, _MAX_READ_ITEMS)
                items += written.items
                if kind in _CONTAINERS:
                    self._known[id(value)] = value, written
            if written.data is None:
                return PlainBytes(None, items, written.too_many)
            size += len(written.data)
            if size > 4 * _MAX_ENTRY:
                return PlainBytes(None, items)
            pieces.append(written.data)
        return PlainBytes(b"".join(pieces), items + len(values))


_SMALL = 1 << 31
_ONLY_TEXT: set[type] = {str}
_CONTAINERS = frozenset({dict, list, tuple})
_UNDEFINED = b"?"  # no value begins so in the format of marshal


def _write_value(whole: UserValue, max_chars: int, max_items: int) -> PlainBytes:
    """Writes one value, unless it is too large or not plain data."""
    items = chars = 0
    stack: list[Any] = [whole]
    while stack:
        value = stack.pop()
        kind = type(value)
        items += 1
        if kind is str:
            chars += len(value)
        elif kind is dict:
            parts = (*value, *value.values())
            if {*map(type, parts)} == _ONLY_TEXT:  # most messages
                items += len(parts)
                chars += sum(map(len, parts))
            else:
                stack.extend(parts)
        elif kind is list or kind is tuple:
            stack.extend(value)
        elif kind is int:
            chars += value.bit_length() // 8
        elif kind is float:
            chars += max_chars if value != value else 0  # a NaN is equal to itself only if shared
        elif value is not None and kind is not bool:
            return PlainBytes(None, items)
        if chars >= max_chars:
            return PlainBytes(None, items)
        if items + len(stack) > max_items:
            return PlainBytes(None, items, too_many=True)
    try:
        return PlainBytes(marshal.dumps(whole, 2), items)
    except ValueError:  # nested too deeply
        return PlainBytes(None, items)


def memoize_loops(template: nodes.Template, first: int = 0) -> list[tuple[str, ...]]:
    """Rewrites the outer loops of a template so that they remember their iterations. An iteration
    asks the environment's `is_new_iteration` whether to execute the body, and passes what the body
    has written to the filter REMEMBER, whose result is written.

    Args:
        first: number of the first loop that is rewritten.

    Returns:
        For each rewritten loop, the names of the variables that it reads and no statement sets.
        Their values are the first of the reads that `is_new_iteration` gets.
    """
    rewriter = _LoopRewriter(template, first)
    rewriter.rewrite_all()
    return rewriter.variables


class _UnknownReadsError(Exception):
    """Raised for a body that may read anything, or change something outside itself."""


class _LoopRewriter:
    """Rewrites a template's loops outside macros and blocks, whose texts depend on their callers.

    Attributes:
        variables: see `memoize_loops`.
    """

    def __init__(self, template: nodes.Template, first: int) -> None:
        self.variables: list[tuple[str, ...]] = []
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
        elif isinstance(statement, nodes.For) and not statement.recursive:
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
        set_outside = _names_set([self._template], loop.body) | self._macros
        variables = list[nodes.Name]()
        others = list[nodes.Expr]()
        for read in found.values():
            if isinstance(read, nodes.Name) and read.name not in set_outside:
                variables.append(read)
            else:
                others.append(read)
        number = self._first + len(self.variables)
        self.variables.append(tuple(variable.name for variable in variables))
        ask = nodes.EnvironmentAttribute("is_new_iteration")
        is_new = nodes.Call(ask, [nodes.Const(number), *variables, *others], [], None, None)
        remember = nodes.Filter(None, REMEMBER, [], [], None, None)
        loop.body = [nodes.FilterBlock([nodes.If(is_new, loop.body, [], [])], remember)]


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


def _names_set(outer: Sequence[nodes.Node], without: Sequence[nodes.Node] = ()) -> frozenset[str]:
    """Returns the names that nodes set, without those that only the nodes `without` set."""
    found = set[str]()
    stack = list(outer)
    while stack:
        node = stack.pop()
        if any(node is each for each in without):
            continue
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


def _calls_namespace(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Call) and node.node == nodes.Name("namespace", "load")
