"""Graph of a program, made from its traces, and the lines that none of them reached. Its checks are
in graph_checks.py.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

from sglang_lite import wire
from sglang_lite.errors import SglError
from sglang_lite.lang.backend.base import Backend
from sglang_lite.lang.execution.branch import find_raise_location
from sglang_lite.lang.expressions import BaseProgram
from sglang_lite.lang.symbolic.graph_checks import Finding, check
from sglang_lite.lang.symbolic.recorder import TracedWay, is_limit
from sglang_lite.lang.symbolic.symbols import Symbol
from sglang_lite.markup import Markup, cut, fragment
from sglang_lite.program import drawing
from sglang_lite.program.graph import Change, GraphRecord, Problem, Way
from sglang_lite.program.nodes import Path, Text
from sglang_lite.program.prefixes import PrefixTree, TokenCounter, prefix_tree
from sglang_lite.protocol import Location, ParameterError, WireError
from sglang_lite.protocol.anything import Foreign, UserValue


class HasTokenizer(Protocol):
    """Object with a tokenizer, an engine for example."""

    @property
    def tokenizer(self) -> Foreign:
        """Tokenizer of the model."""


class Graph(GraphRecord, frozen=True):
    """Graph of a program, a frozen record. `program.trace(…).graph()` makes it; `str(graph)` shows
    it.
    """

    def __str__(self) -> str:
        return drawing.as_text(self)

    def __repr__(self) -> str:
        return f"Graph({cut(drawing.title(self), 280)})"

    def _repr_html_(self) -> str:
        return fragment(self.svg())

    def svg(self) -> Markup:
        """Drawing as SVG: a column for each branch and for each way behind a branching."""
        return drawing.as_svg(self)

    def mermaid(self) -> str:
        """Flowchart in Mermaid's language."""
        return drawing.as_mermaid(self)

    def dot(self) -> str:
        """Graph in Graphviz's DOT language."""
        return drawing.as_dot(self)

    def check(self, backend: Backend | None = None) -> tuple[Finding, ...]:
        """Faults that can be found without a run, in the order of lines (listed in docs/graph.md).

        Args:
            backend: backend whose support for each node is checked; None to check only that
                constraints can be enforced by the engine.
        """
        return check(self, backend)

    def prefixes(
        self, rows: Sequence[Mapping[str, UserValue]], tokenizer: TokenCounter | HasTokenizer
    ) -> PrefixTree:
        """Prefixes that runs with these arguments share, and the number of tokens that sharing
        saves.

        Args:
            rows: arguments of each run, by name.
            tokenizer: tokenizer that counts the tokens, or an engine that has one.

        Raises:
            ParameterError: an argument is missing, an argument lacks an attribute or item that the
                body reads, or `tokenizer` is not a tokenizer.
        """
        counter: Any = getattr(tokenizer, "tokenizer", tokenizer)
        if not hasattr(counter, "encode_spans"):
            problem = f"a {type(tokenizer).__name__} is not a tokenizer."
            raise ParameterError("tokenizer", problem, hint="Give an engine, or its `tokenizer`.")
        for i, row in enumerate(rows):
            for name in self.arguments:
                if name not in row:
                    raise ParameterError(
                        "rows",
                        f"row {i} has no {name!r}.",
                        hint="Give a value for every argument that is not bound.",
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
    program: BaseProgram,
    arguments: Mapping[str, UserValue],
    ways: Sequence[TracedWay],
    *,
    complete: bool,
) -> Graph:
    """Graph of ways through a program's body.

    Args:
        arguments: arguments of the body, some of which may be symbols.
        complete: whether `ways` are all ways.
    """
    traced = ways[0].graph
    found = tuple(map(_way, ways))
    symbols = [(name, value) for name, value in arguments.items() if isinstance(value, Symbol)]
    names = tuple(name for name, value in symbols if value.__origin__().name == name)
    read = traced.read.union(
        use.source for node in traced.nodes for use in node.uses if use.source is not None
    )
    never: list[Location] = []
    if complete:
        failed = [way.problem.where for way in found if way.problem is not None]
        never = unreached(
            program.func, [node.where for node in traced.nodes] + failed, traced.question_lines
        )
    return Graph(
        program.name,
        names,
        tuple(traced.nodes),
        found,
        complete,
        tuple(sorted(read)),
        unreached=tuple(never),
    )


def _way(way: TracedWay) -> Way:
    ended: Literal["returned", "raised", "cut"] = (
        "cut" if way.cut else "returned" if way.error is None else "raised"
    )
    problem = None if way.error is None else _problem(way.error)
    return Way(tuple(way.ids), way.outcomes, ended, problem, way.returns)


def _problem(error: Exception) -> Problem:
    kind = "TraceError" if is_limit(error) else type(error).__name__
    where = getattr(error, "where", None) or find_raise_location(error)
    if isinstance(error, SglError):
        return Problem(kind, error.message, error.hint, where, ours=True)
    return Problem(kind, f"{error}"[:1000], "", where)


def changed(graph: Graph, other: GraphRecord) -> Graph:
    """Graph with added changes: the texts that differ in another trace of the program's first way,
    for each branch up to the first node at which the two are not comparable.
    """
    found = {change.node: change for change in graph.changes}
    others = _by_branch(other)
    for branch, ids in _by_branch(graph).items():
        for i, j in zip(ids, others.get(branch, ())):
            one = graph.nodes[i].node
            two = other.nodes[j].node
            if type(one) is not type(two):
                break
            if isinstance(one, Text) and isinstance(two, Text) and one.text != two.text:
                found.setdefault(i, Change(i, one.text, two.text))
    return msgspec.structs.replace(graph, changes=tuple(found[i] for i in sorted(found)))


def _by_branch(graph: GraphRecord) -> dict[Path, list[int]]:
    """Nodes of the first way by branch, as threads may add to several branches in any order. The
    key of a branch lists, for each fork on the way, the number of its branch's nodes before it and
    the index in the fork.
    """
    found: dict[Path, list[int]] = defaultdict(list)
    places: dict[int, int] = {}  # numbers of nodes before a node in its branch

    def key(path: Path) -> Path:
        return (*key(path[:-2]), places[path[-2]], path[-1]) if path else ()

    for i in graph.ways[0].nodes:
        branch = found[key(graph.nodes[i].path)]
        places[i] = len(branch)
        branch.append(i)
    return found


_Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
_TURNS = ("system", "user", "assistant")
_ENDS = (ast.Return, ast.Raise, ast.Break, ast.Continue)


def unreached(
    body: Callable[..., UserValue], reached: Iterable[Location | None], asked: Iterable[Location]
) -> list[Location]:
    """Locations of statements that no way has reached, behind a condition that was explored or
    behind the end of their block. (Other statements may be reached with other arguments or
    globals.)

    Args:
        reached: locations of what all ways through the body have added, or at which they ended with
            an error.
        asked: locations of all questions.
    """
    try:
        lines, first = inspect.getsourcelines(body)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return []
    function = tree.body[0] if tree.body else None
    if not isinstance(function, _Function) or not function.args.args:
        return []
    code = inspect.unwrap(body).__code__
    here = {
        location.line - first + 1
        for location in reached
        if location is not None and location.file == code.co_filename
    }
    question_lines = {each.line - first + 1 for each in asked if each.file == code.co_filename}
    return [
        Location(code.co_filename, statement.lineno + first - 1, code.co_qualname)
        for statement in _dead(
            function.body, function.args.args[0].arg, question_lines, doubtful=False
        )
        if here.isdisjoint(_lines(statement))
    ]


def _lines(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _dead(
    block: Sequence[ast.stmt], state: str, question_lines: set[int], *, doubtful: bool
) -> Iterator[ast.stmt]:
    """Yields the statements that add to the state and that may be unreachable."""
    for statement in block:
        if doubtful and _adds(statement, state):
            yield statement
        inside = doubtful
        if isinstance(statement, ast.If | ast.While):
            inside = doubtful or not question_lines.isdisjoint(_lines(statement.test))
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, ())
            if not isinstance(statement, _Function | ast.ClassDef):
                yield from _dead(inner, state, question_lines, doubtful=inside)
        doubtful = doubtful or isinstance(statement, _ENDS)


def _adds(statement: ast.stmt, state: str) -> bool:
    match statement:
        case ast.AugAssign(target=ast.Name(id=name), op=ast.Add()):
            return name == state
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr))):
            return name == state and attr in _TURNS
    return False
