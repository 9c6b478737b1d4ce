"""Graph of a program, made from its traces. Its checks are in graph_checks.py."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from sglang_lite import wire
from sglang_lite.errors import SglError
from sglang_lite.lang.backend.base_backend import BaseBackend
from sglang_lite.lang.execution.branch import raised_at
from sglang_lite.lang.expressions import SglGen, SglGetForkItem, SglImage
from sglang_lite.lang.symbolic.graph_checks import Finding, check
from sglang_lite.lang.symbolic.symbols import (
    MARK,
    Entry,
    Symbol,
    SymbolOrigin,
    TracedQuestion,
    TraceLog,
    is_limit,
    origin,
)
from sglang_lite.lang.symbolic.unreached import unreached
from sglang_lite.program import drawing
from sglang_lite.program.graph import (
    AccessStep,
    Branching,
    Change,
    GraphNode,
    GraphRecord,
    Picture,
    Problem,
    Use,
    Value,
    Way,
)
from sglang_lite.program.nodes import (
    BaseNode,
    Fork,
    Gen,
    GrammarBegin,
    Join,
    Mark,
    Path,
    Rollback,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
    TurnBegin,
    TurnEnd,
)
from sglang_lite.program.prefixes import PrefixTree, TokenCounter, prefix_tree
from sglang_lite.protocol import UNSET, ParameterError, WireError
from sglang_lite.protocol.anything import Foreign, UserValue

if TYPE_CHECKING:
    from sglang_lite.lang.tracer import TracedPath


class HasTokenizer(Protocol):
    """Object with a tokenizer, an engine for example."""

    @property
    def tokenizer(self) -> Foreign:
        """Tokenizer of the model."""


class Graph(GraphRecord, frozen=True):
    """Graph of a program, a frozen record. `program.trace(…).graph()` makes it; `str(graph)` shows it."""

    def __str__(self) -> str:
        return drawing.as_text(self)

    def mermaid(self) -> str:
        """Flowchart in Mermaid's language."""
        return drawing.as_mermaid(self)

    def dot(self) -> str:
        """Graph in Graphviz's DOT language."""
        return drawing.as_dot(self)

    def check(self, backend: BaseBackend | None = None) -> tuple[Finding, ...]:
        """Faults that can be found without a run, in the order of lines (listed in docs/graph.md).

        Args:
            backend: backend whose support for each node is checked; None to check only that constraints can be enforced
                by the engine.
        """
        return check(self, backend)

    def prefixes(self, rows: Sequence[Mapping[str, UserValue]], tokenizer: TokenCounter | HasTokenizer) -> PrefixTree:
        """Prefixes that runs with these arguments share, and the number of tokens that sharing saves.

        Args:
            rows: arguments of each run, by name.
            tokenizer: tokenizer that counts the tokens, or an engine that has one.

        Raises:
            ParameterError: an argument is missing, an argument lacks an attribute or item that the body reads, or
                `tokenizer` is not a tokenizer.
        """
        counter: Any = getattr(tokenizer, "tokenizer", tokenizer)
        if not hasattr(counter, "encode_spans"):
            problem = f"a {type(tokenizer).__name__} is not a tokenizer."
            raise ParameterError("tokenizer", problem, hint="Give an engine, or its `tokenizer`.")
        for i, row in enumerate(rows):
            for name in self.arguments:
                if name not in row:
                    raise ParameterError(
                        "rows", f"row {i} has no {name!r}.", hint="Give a value for every argument that is not bound."
                    )
        return prefix_tree([self.filled(row) for row in rows], counter)

    def to_json(self) -> bytes:
        """Graph as JSON (UTF-8), with the version of the format."""
        return wire.encode(GraphRecord(*_fields(self)))

    @staticmethod
    def from_json(data: bytes | str) -> Graph:
        """Graph from the result of `to_json`.

        Raises:
            WireError: the data is not a graph, has another version, is damaged, or is too large.
        """
        found = wire.decode(data.encode() if isinstance(data, str) else data)
        if not isinstance(found, GraphRecord):
            raise WireError(f"a {type(found).__name__} is not a graph", pointer="/type")
        return Graph(*_fields(found))


def _fields(graph: GraphRecord) -> tuple[Any, ...]:
    return tuple(getattr(graph, name) for name in GraphRecord.__struct_fields__)


def graph_of(
    program: str, paths: Sequence[TracedPath], again: TraceLog, *, body: Callable[..., UserValue], complete: bool
) -> Graph:
    """Graph of the paths that traces have recorded.

    Args:
        program: name of the program.
        paths: one trace for each way through the body.
        again: log of a second trace of the first way.
        body: body of the program.
        complete: whether `paths` contains all ways.
    """
    merged = _Merged()
    ways = [merged.way(path) for path in paths]
    symbols = [name for name, value in paths[0].state.arguments.items() if isinstance(value, Symbol)]
    arguments = tuple(name for name in symbols if origin(paths[0].state.arguments[name]).name == name)
    first = paths[0].state.recording
    failed = [way.problem.where for way in ways if way.problem is not None]
    never = unreached(body, [path.state.recording for path in paths], failed) if complete else []
    return Graph(
        program, arguments, tuple(merged.nodes), tuple(ways), complete, tuple(sorted(merged.read)),
        tuple(_changes(first, again, ways[0])), tuple(never),
    )  # fmt: skip


class _Merged:
    """Merges the nodes of several ways through a body. Ways share their nodes up to the first decision in which they
    differ."""

    def __init__(self) -> None:
        self.nodes: list[GraphNode] = []
        self.read: set[int] = set()
        # Keys: outcomes so far, and number of nodes since the last one.
        self._known: dict[tuple[tuple[int, ...], int], int] = {}

    def way(self, path: TracedPath) -> Way:
        recording = path.state.recording
        reader = _Reader(recording)
        ids: list[int] = []
        outcomes: tuple[int, ...] = ()
        place = 0
        for entry in recording.entries:
            if isinstance(entry.node, SglGetForkItem):
                continue
            key = outcomes, place
            if key not in self._known:
                self._known[key] = len(self.nodes)
                self.nodes.append(reader.node(entry))
            i = self._known[key]
            ids.append(i)
            reader.pass_by(entry, i)
            place += 1
            if isinstance(entry.node, TracedQuestion):
                outcomes, place = (*outcomes, entry.node.outcome), 0
        for symbol in recording.reads:
            source = reader.source(origin(symbol))
            if source is not None:
                self.read.add(source)
        self.read |= {use.source for i in ids for use in self.nodes[i].uses if use.source is not None}
        ended: Literal["returned", "raised", "cut"]
        ended = "cut" if path.cut else "raised" if path.error is not None else "returned"
        problem = None if path.error is None else _problem(path.error)
        return Way(tuple(ids), outcomes, ended, problem, path.state.ret_value is not None)


class _Reader:
    """Makes the graph nodes of one trace, with their branch, turn and scopes."""

    def __init__(self, recording: TraceLog) -> None:
        self._marks = recording.marks
        self._paths: dict[int, Path] = {}  # paths of branches, by id of their state
        self._roles: dict[int, str | None] = {}
        self._scopes: dict[int, tuple[str, ...]] = {}
        self._at_marks: dict[int, list[tuple[str | None, tuple[str, ...]]]] = {}
        self._ids: dict[int, int] = {}  # indices in the graph, by id of the node

    def node(self, entry: Entry) -> GraphNode:
        """Graph node of an entry."""
        state = id(entry.state)
        node, uses = self._record(entry)
        own = entry.expression
        tools = tuple(own.tools.tools) if isinstance(own, SglGen) and own.tools is not None else ()
        joins = tuple(self._paths[id(each)] for each in entry.states) if isinstance(node, Join) else ()
        return GraphNode(
            node, self._paths.get(state, ()), self._roles.get(state), self._scopes.get(state, ()), uses, tools, joins
        )

    def pass_by(self, entry: Entry, i: int) -> None:
        """Updates the open turns, scopes and branches after an entry, which is node `i`."""
        state = id(entry.state)
        self._ids[id(entry.node)] = i
        match entry.node:
            case TurnBegin(role):
                self._roles[state] = self._plain(role)
            case TurnEnd():
                self._roles[state] = None
            case ScopeBegin(name):
                self._scopes[state] = (*self._scopes.get(state, ()), self._plain(name))
            case ScopeEnd():
                self._scopes[state] = self._scopes.get(state, ())[:-1]
            case Mark():
                here = self._roles.get(state), self._scopes.get(state, ())
                self._at_marks.setdefault(state, []).append(here)
            case Rollback(mark=mark):
                self._roles[state], self._scopes[state] = self._at_marks[state][mark]
        if not isinstance(entry.node, Join):
            for number, each in enumerate(entry.states):
                self._paths[id(each)] = (*self._paths.get(state, ()), i, number)
                if isinstance(entry.node, Fork):
                    self._roles[id(each)] = self._roles.get(state)
                    self._scopes[id(each)] = self._scopes.get(state, ())

    def source(self, of: SymbolOrigin) -> int | None:
        return None if of.source is None else self._ids.get(id(of.source))

    def _use(self, symbol: Symbol, into: str) -> Use:
        of = origin(symbol)
        return Use(of.name, tuple(_part(kind, key) for kind, key in of.parts), into, self.source(of))

    def _marked(self, text: str) -> list[Symbol]:
        return [self._marks[mark] for mark in MARK.findall(text) if mark in self._marks]

    def _plain(self, text: str) -> str:
        """Text with its symbols replaced by their expressions in braces."""
        return MARK.sub(lambda mark: f"{{{self._use(self._marks[mark[0]], '').expression}}}", text)

    def _record(self, entry: Entry) -> tuple[Any, tuple[Use, ...]]:
        node, where = entry.node, entry.where
        match node:
            case TracedQuestion():
                return Branching(node.question, node.outcomes, where=where), (self._use(node.symbol, "question"),)
            case Symbol():
                return Value(where=where), (self._use(node, "text"),)
            case SglImage(source):
                is_known = isinstance(source, str | Symbol)
                return Picture(f"{source!r:.60}", where=where), self._in(source, "image") if is_known else ()
            case Gen():
                assert isinstance(entry.expression, SglGen)
                return self._gen(node, entry.expression)
            case Select():
                node_choices: Any = node.choices
                if isinstance(node_choices, Symbol):
                    record = _replace(node, name=self._name(node.name), choices=(), seed=UNSET)
                    return record, (self._use(node_choices, "choices"),)
                uses = tuple(self._use(each, "choices") for choice in node_choices for each in self._marked(choice))
                choices = tuple(map(self._plain, node_choices))
                return _replace(node, name=self._name(node.name), choices=choices, seed=UNSET), uses
            case GrammarBegin(constraint):
                return node, self._in(constraint, "constraint")
            case TurnBegin(role) | TurnEnd(role):
                return _replace(node, role=self._plain(role)), ()
            case ScopeBegin(name) | ScopeEnd(name):
                return _replace(node, name=self._plain(name)), ()
        assert isinstance(node, BaseNode)
        return node if node.where is not None else _replace(node, where=where), ()

    def _name(self, name: str | None) -> str | None:
        return None if name is None else self._plain(name)

    def _in(self, value: object, into: str) -> tuple[Use, ...]:
        """Uses of the symbols in a value."""
        if isinstance(value, Symbol):
            return (self._use(value, into),)
        if not isinstance(value, str):
            value = msgspec.json.encode(value, enc_hook=str).decode()
        return tuple(self._use(each, into) for each in self._marked(value))

    def _gen(self, node: Gen, own: SglGen) -> tuple[Gen, tuple[Use, ...]]:
        """Generation as the user requested it, without additions of a template or a backend, and its uses of
        symbols."""
        uses: list[Use] = []
        user_node = own.node
        constraint = user_node.constraint
        if constraint is not None and (found := self._in(constraint, "constraint")):
            uses += found
            constraint = None
        params = user_node.params
        for name in params.__struct_fields__:
            value = getattr(params, name)
            if value is not UNSET and (found := self._in(value, name)):
                uses += found
                params = _replace(params, **{name: UNSET})
        record = Gen(self._name(user_node.name), params, constraint, node.held, where=node.where)
        return record, tuple(uses)


def _replace(record: Any, **changes: Any) -> Any:
    return msgspec.structs.replace(record, **changes)


def _part(kind: str, key: object) -> AccessStep:
    if kind == "attribute":
        return "attribute", str(key)
    if type(key) in (str, int):
        return "item", key  # type: ignore[return-value] # one of the two
    return "other", f"{key!r:.60}"


def _problem(error: Exception) -> Problem:
    kind = "TraceError" if is_limit(error) else type(error).__name__
    where = getattr(error, "where", None) or raised_at(error)
    if isinstance(error, SglError):
        return Problem(kind, error.message, error.hint, where, ours=True)
    return Problem(kind, f"{error}"[:1000], "", where)


def changed(graph: Graph, other: GraphRecord) -> Graph:
    """Graph with added changes: the texts that differ in another trace of the program, up to the first node at which
    the two are not comparable."""
    found = {change.node: change for change in graph.changes}
    for i, j in zip(graph.ways[0].nodes, other.ways[0].nodes):
        one, two = graph.nodes[i].node, other.nodes[j].node
        if type(one) is not type(two):
            break
        if isinstance(one, Text) and isinstance(two, Text) and one.text != two.text:
            found.setdefault(i, Change(i, one.text, two.text))
    return msgspec.structs.replace(graph, changes=tuple(found.values()))


def _changes(first: TraceLog, again: TraceLog, way: Way) -> list[Change]:
    """Texts that differ in a second trace, for each branch up to the first node at which the two are not comparable."""
    found: list[Change] = []
    others = _by_branch(again)
    for branch, entries in _by_branch(first).items():
        for (place, a), (_, b) in zip(entries, others.get(branch, ())):
            if type(a.node) is not type(b.node):
                break
            if isinstance(a.node, Text) and isinstance(b.node, Text) and a.node.text != b.node.text:
                found.append(Change(way.nodes[place], a.node.text, b.node.text))
    return sorted(found, key=lambda change: change.node)


def _by_branch(recording: TraceLog) -> dict[tuple[int, ...], list[tuple[int, Entry]]]:
    """Entries and their indices in the log, by branch, as threads may add to several branches in any order. The key of
    a branch lists, for each fork on the way, the number of entries before it and the index in the fork."""
    found: dict[tuple[int, ...], list[tuple[int, Entry]]] = defaultdict(list)
    branches: dict[int, tuple[int, ...]] = {}  # keys of branches, by id of their state
    entries = (entry for entry in recording.entries if not isinstance(entry.node, SglGetForkItem))
    for place, entry in enumerate(entries):
        branch = branches.get(id(entry.state), ())
        for i, state in enumerate(entry.states):
            branches.setdefault(id(state), (*branch, len(found[branch]), i))
        found[branch].append((place, entry))
    return found
