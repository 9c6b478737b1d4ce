"""Finds the prefixes that the runs of a program share, the node where the runs begin to differ, and
texts that could be moved to make the shared prefixes longer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from sglang_lite.program.graph import GraphNode, GraphRecord, Value
from sglang_lite.program.nodes import Gen, Select, Text, TurnBegin, TurnEnd
from sglang_lite.program.prefixes import (
    PrefixTree,
    TokenCounter,
    build_prefix_tree,
    common_prefix_length,
)
from sglang_lite.protocol import Location

MIN_GAIN: Final = 32  # minimum number of tokens that a move must save per run
MAX_ROWS: Final = 200  # maximum number of rows that moves are computed for


@dataclass(frozen=True, slots=True)
class Divergence:
    """First node at which the prompts of several runs differ.

    Attributes:
        node: the first node that differs.
        shared_characters: number of characters before it that all runs share.
    """

    node: GraphNode
    shared_characters: int


@dataclass(frozen=True, slots=True)
class Move:
    """Suggestion to move a text that all runs share ahead of text that differs from run to run.

    Attributes:
        where: location of the text to move.
        line, above: line number of the text in the user's file, and of the line to move it above.
        tokens: additional number of shared tokens for each run except the first.
        less: fraction of the computed tokens that the move saves, or None if it depends on the
            rows.
    """

    where: Location
    line: int
    above: int
    tokens: int
    less: float | None

    def __str__(self) -> str:
        less = "" if self.less is None else f", -{self.less:.0%} prefill"
        return f"move line {self.line} above line {self.above}: +{self.tokens:,} shared tokens a row{less}"


def first_divergence(graphs: Sequence[GraphRecord]) -> Divergence | None:
    """Returns the node at which runs begin to differ. Considers only the text before the first
    generation or selection. Returns None if the runs don't differ there.
    """
    starts = [list(_texts_before_first_answer(graph)) for graph in graphs]
    texts = ["".join(text for text, _ in start) for start in starts]
    same = min(common_prefix_length(texts[0], text) for text in texts)
    at = 0
    for text, i in starts[0]:
        node = graphs[0].nodes[i]
        open_value = isinstance(node.node, Value)
        if open_value or (at + len(text) > same and any(other != texts[0] for other in texts)):
            return Divergence(node, min(same, at) if open_value else same)
        at += len(text)
    return None


def _texts_before_first_answer(graph: GraphRecord) -> Iterator[tuple[str, int]]:
    """Yields the texts of the main branch up to its first generation or selection, each with the
    index of its node.
    """
    for i in graph.ways[0].nodes:
        node = graph.nodes[i]
        if node.path:
            continue
        if isinstance(node.node, Gen | Select):
            return
        if isinstance(node.node, Text | Value):
            yield getattr(node.node, "text", ""), i


@dataclass(frozen=True, slots=True)
class _Line:
    """Adjacent texts of one source line.

    Attributes:
        number: line number.
        indices: indices of the texts in the path.
        differs: True if the text differs from run to run.
    """

    number: int
    indices: tuple[int, ...]
    differs: bool


def find_moves(
    graphs: Sequence[GraphRecord], counter: TokenCounter, *, has_rows: bool
) -> list[Move]:
    """Returns moves that would let runs share longer prefixes. A move puts a text that all runs
    share ahead of text in the same turn that differs from run to run. Only moves that save enough
    tokens are returned.

    Args:
        graphs: one graph for each run; twice the same graph if no rows are given.
        has_rows: whether the graphs belong to given rows.
    """
    graphs = graphs[:MAX_ROWS]
    if (
        len(graphs) < 2
        or len({tuple(map(_node_shape_key, _first_path_nodes(graph))) for graph in graphs}) > 1
    ):
        return []
    before = build_prefix_tree(graphs, counter)
    runs = len(graphs) - 1  # the first run has no earlier run to share with
    found = []
    for lines in _movable_regions(graphs):
        first = next((line for line in lines if line.differs), None)
        if first is None:
            continue
        for line in lines[lines.index(first) + 1 :]:
            if line.differs or sum(other.number == line.number for other in lines) > 1:
                continue
            after = build_prefix_tree(
                [_apply_move(graph, line, first) for graph in graphs], counter
            )
            gain = before.unique - after.unique
            where = _first_path_nodes(graphs[0])[line.indices[0]].where
            if where is not None and gain // runs >= MIN_GAIN:
                less = gain / before.unique if has_rows else None
                found.append(Move(where, line.number, first.number, gain // runs, less))
    return found


def _first_path_nodes(graph: GraphRecord) -> list[GraphNode]:
    return [graph.nodes[i] for i in graph.ways[0].nodes]


def _node_shape_key(node: GraphNode) -> tuple[object, ...]:
    kind = "Text" if isinstance(node.node, Value) else node.kind
    return kind, node.path, node.line


def _movable_regions(graphs: Sequence[GraphRecord]) -> Iterator[list[_Line]]:
    """Yields groups of lines whose texts could change places. The lines of a group are adjacent in
    a turn and have no other nodes between them.
    """
    columns = list(zip(*map(_first_path_nodes, graphs)))
    nodes = [column[0] for column in columns]
    for path in dict.fromkeys(node.path for node in nodes):
        indices = [at for at, node in enumerate(nodes) if node.path == path]
        plain = {at for i, at in enumerate(indices) if _is_user_text(nodes, indices, i)}
        lines: list[_Line] = []
        keys = [(at in plain, nodes[at].line) for at in indices]
        for number, pairs in itertools.groupby(zip(keys, indices), lambda pair: pair[0]):
            line_indices = tuple(at for _, at in pairs)
            if not number[0] or _has_other_nodes(nodes, line_indices, plain):
                if lines:
                    yield lines
                lines = []
            else:
                lines.append(
                    _Line(
                        number[1],
                        line_indices,
                        any(_differs_between_runs(columns[at]) for at in line_indices),
                    )
                )
        if lines:
            yield lines


def _is_user_text(nodes: Sequence[GraphNode], indices: Sequence[int], i: int) -> bool:
    """Returns True if a node is text written by the user, rather than text of the template around a
    turn.
    """
    if not isinstance(nodes[indices[i]].node, Text | Value):
        return False
    after = nodes[indices[i + 1]].node if i + 1 < len(indices) else None
    before = nodes[indices[i - 1]].node if i else None
    return not isinstance(after, TurnBegin) and not isinstance(before, TurnEnd)


def _has_other_nodes(
    nodes: Sequence[GraphNode], line_indices: Sequence[int], inside: set[int]
) -> bool:
    """Returns True if the source line of these texts also has nodes outside `inside`. The line then
    can't be moved as a whole.
    """
    first = nodes[line_indices[0]]
    return any(
        node.line == first.line and node.path == first.path and at not in inside
        for at, node in enumerate(nodes)
    )


def _differs_between_runs(column: Sequence[GraphNode]) -> bool:
    """Returns True if a text differs between runs. `column` has the corresponding node of each run.
    An argument or variable without a known value counts as different.
    """
    return (
        isinstance(column[0].node, Value)
        or len({getattr(node.node, "text", "") for node in column}) > 1
    )


def _apply_move(graph: GraphRecord, line: _Line, above: _Line) -> GraphRecord:
    order = list(graph.ways[0].nodes)
    moved = [order[at] for at in line.indices]
    rest = [i for at, i in enumerate(order) if at not in line.indices]
    at = rest.index(order[above.indices[0]])
    way = msgspec.structs.replace(graph.ways[0], nodes=(*rest[:at], *moved, *rest[at:]))
    return msgspec.structs.replace(graph, ways=(way,))


@dataclass(frozen=True, slots=True)
class Sharing:
    """Prefixes that runs of a program share.

    Attributes:
        tree: prefixes of all prompts.
        has_rows: True if the runs belong to given rows; False for two runs that have only the
            program in common.
        last_run: number of tokens that the last run computes, and number of its prompt tokens.
        divergence: node at which the runs begin to differ, or None.
        moves: moves of text that would let the runs share more.
    """

    tree: PrefixTree
    has_rows: bool
    last_run: tuple[int, int]
    divergence: Divergence | None
    moves: tuple[Move, ...]


def measure_sharing(
    graphs: Sequence[GraphRecord], counter: TokenCounter, *, has_rows: bool
) -> Sharing:
    """Computes the prefixes that the runs of these graphs share.

    Args:
        graphs: one graph for each run; twice the same graph if no rows are given.
        has_rows: whether the graphs belong to given rows.
    """
    tree = build_prefix_tree(graphs, counter)
    but_one = build_prefix_tree(graphs[:-1], counter)
    further = tree.unique - but_one.unique, tree.tokens - but_one.tokens
    return Sharing(
        tree,
        has_rows,
        further,
        first_divergence(graphs),
        tuple(find_moves(graphs, counter, has_rows=has_rows)),
    )
