"""Builds the graph of a program from its traces. Also finds the lines that no trace reached. The
checks of a graph are in graph_checks.py.
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
from sglang_lite.lang.symbolic.graph_checks import Finding, check_graph
from sglang_lite.lang.symbolic.recorder import TracedWay, is_tracing_limit
from sglang_lite.lang.symbolic.symbols import Symbol
from sglang_lite.notebook.markup import Markup, notebook_html, shorten_text
from sglang_lite.program import drawing
from sglang_lite.program.graph import Change, GraphRecord, Problem, Way
from sglang_lite.program.nodes import Path, Text
from sglang_lite.program.prefixes import PrefixTree, TokenCounter, build_prefix_tree
from sglang_lite.protocol import Location, ParameterError, WireError
from sglang_lite.protocol.anything import Foreign, UserValue


class HasTokenizer(Protocol):
    """Object with a tokenizer, such as an engine."""

    @property
    def tokenizer(self) -> Foreign:
        """Tokenizer of the model."""


class Graph(GraphRecord, frozen=True):
    """Graph of a program, as a frozen record. `program.trace(…).graph()` creates it, and
    `str(graph)` lists its nodes.
    """

    def __str__(self) -> str:
        return drawing.as_text(self)

    def __repr__(self) -> str:
        return f"Graph({shorten_text(drawing.title(self), 280)})"

    def _repr_html_(self) -> str:
        return notebook_html(self.svg())

    def svg(self) -> Markup:
        """Returns a drawing of the graph as SVG. Each branch has a column, and so has each traced
        path after a decision.
        """
        return drawing.as_svg(self)

    def mermaid(self) -> str:
        """Returns a flowchart in Mermaid's syntax."""
        return drawing.as_mermaid(self)

    def dot(self) -> str:
        """Returns the graph in Graphviz's DOT language."""
        return drawing.as_dot(self)

    def check(self, backend: Backend | None = None) -> tuple[Finding, ...]:
        """Returns the faults that can be found without running the program, ordered by line. The
        kinds of fault are listed in docs/graph.md.

        Args:
            backend: backend whose support for each node is checked. None checks only that the
                engine can enforce the constraints.
        """
        return check_graph(self, backend)

    def prefixes(
        self, rows: Sequence[Mapping[str, UserValue]], tokenizer: TokenCounter | HasTokenizer
    ) -> PrefixTree:
        """Returns the prompt prefixes that several runs share, and the number of tokens saved by
        sharing them.

        Args:
            rows: for each run, its arguments by name.
            tokenizer: tokenizer used to count tokens, or an engine that has one.

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
        return build_prefix_tree([self.with_arguments(row) for row in rows], counter)

    def to_json(self) -> bytes:
        """Returns the graph as JSON (UTF-8), including the format's version."""
        return wire.encode(GraphRecord(*_fields(self)))

    @staticmethod
    def from_json(data: bytes | str) -> Graph:
        """Returns the graph that `to_json` encoded.

        Raises:
            WireError: the data is not a graph, has another version, is damaged, or is too large.
        """
        found = wire.decode(data.encode() if isinstance(data, str) else data)
        if not isinstance(found, GraphRecord):
            raise WireError(f"a {type(found).__name__} is not a graph", pointer="/type")
        return Graph(*_fields(found))


def _fields(graph: GraphRecord) -> tuple[Any, ...]:
    return tuple(getattr(graph, name) for name in GraphRecord.__struct_fields__)


def build_graph(
    program: BaseProgram,
    arguments: Mapping[str, UserValue],
    ways: Sequence[TracedWay],
    *,
    complete: bool,
) -> Graph:
    """Builds a graph from the traced paths through a program's body.

    Args:
        arguments: arguments of the body; some may be symbols.
        ways: traced paths, at least one.
        complete: whether `ways` contains every path through the body.
    """
    traced = ways[0].graph
    found = tuple(map(_convert_way, ways))
    symbols = [(name, value) for name, value in arguments.items() if isinstance(value, Symbol)]
    names = tuple(name for name, value in symbols if value.__origin__().name == name)
    read = traced.read.union(
        use.source for node in traced.nodes for use in node.uses if use.source is not None
    )
    never: list[Location] = []
    if complete:
        failed = [way.problem.where for way in found if way.problem is not None]
        never = find_unreached_statements(
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


def _convert_way(way: TracedWay) -> Way:
    ended: Literal["returned", "raised", "cut"] = (
        "cut" if way.cut else "returned" if way.error is None else "raised"
    )
    problem = None if way.error is None else _convert_error(way.error)
    return Way(tuple(way.ids), way.outcomes, ended, problem, way.returns)


def _convert_error(error: Exception) -> Problem:
    kind = "TraceError" if is_tracing_limit(error) else type(error).__name__
    where = getattr(error, "where", None) or find_raise_location(error)
    if isinstance(error, SglError):
        return Problem(kind, error.message, error.hint, where, ours=True)
    return Problem(kind, f"{error}"[:1000], "", where)


def with_text_changes(graph: Graph, other: GraphRecord) -> Graph:
    """Returns the graph with an added `Change` for each text that differs in another trace of the
    same program. Compares only the first paths. In each branch, the comparison stops at the first
    pair of nodes with different types.
    """
    found = {change.node: change for change in graph.changes}
    others = _nodes_by_branch(other)
    for branch, ids in _nodes_by_branch(graph).items():
        for i, j in zip(ids, others.get(branch, ())):
            one = graph.nodes[i].node
            two = other.nodes[j].node
            if type(one) is not type(two):
                break
            if isinstance(one, Text) and isinstance(two, Text) and one.text != two.text:
                found.setdefault(i, Change(i, one.text, two.text))
    return msgspec.structs.replace(graph, changes=tuple(found[i] for i in sorted(found)))


def _nodes_by_branch(graph: GraphRecord) -> dict[Path, list[int]]:
    """Groups the node ids of the first path by branch. This makes two traces comparable even if
    threads have added to several branches in another order.

    A branch's key contains two numbers for each fork that leads to it: how many nodes precede the
    fork in its own branch, and the index of the branch taken in the fork.
    """
    found: dict[Path, list[int]] = defaultdict(list)
    places: dict[int, int] = {}  # for each node, how many nodes precede it in its branch

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


def find_unreached_statements(
    body: Callable[..., UserValue], reached: Iterable[Location | None], asked: Iterable[Location]
) -> list[Location]:
    """Returns the locations of statements that add to the state but that no traced path has
    reached.

    Considers only statements after a jump such as `return` in their block, and those under a
    condition whose outcomes were explored. (Other statements may be reached with other arguments or
    globals.)

    Args:
        reached: locations at which any traced path has added something or ended with an error.
        asked: locations of all questions about symbols.
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
        for statement in _find_suspect_statements(
            function.body, function.args.args[0].arg, question_lines, doubtful=False
        )
        if here.isdisjoint(_line_range(statement))
    ]


def _line_range(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _find_suspect_statements(
    block: Sequence[ast.stmt], state: str, question_lines: set[int], *, doubtful: bool
) -> Iterator[ast.stmt]:
    """Yields the statements that add to the state and may be unreachable. These are the statements
    after a jump such as `return` in their block, and those under a condition that asks about a
    symbol.
    """
    for statement in block:
        if doubtful and _adds_to_state(statement, state):
            yield statement
        inside = doubtful
        if isinstance(statement, ast.If | ast.While):
            inside = doubtful or not question_lines.isdisjoint(_line_range(statement.test))
        for name in ("body", "orelse", "finalbody"):
            inner = getattr(statement, name, ())
            if not isinstance(statement, _Function | ast.ClassDef):
                yield from _find_suspect_statements(inner, state, question_lines, doubtful=inside)
        doubtful = doubtful or isinstance(statement, _ENDS)


def _adds_to_state(statement: ast.stmt, state: str) -> bool:
    match statement:
        case ast.AugAssign(target=ast.Name(id=name), op=ast.Add()):
            return name == state
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr))):
            return name == state and attr in _TURNS
    return False
