"""Predicts which loops outgrow the model's context.

The prompts of a traced program are measured in order: texts are counted, and each generation adds
its max_tokens. Values that only a run knows, images, and results of tools add nothing, so the
prediction errs on the low side there.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import math
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_lite.lang.symbolic.graph_checks import Finding
from sglang_lite.program.graph import Branching, Compact, GraphNode, GraphRecord, Way
from sglang_lite.program.nodes import (
    Fork,
    Gen,
    Join,
    Mark,
    Path,
    Rollback,
    Select,
    Text,
    TurnEnd,
)
from sglang_lite.protocol import Location, Unset
from sglang_lite.protocol.anything import UserValue

_ADVICE = "Drop turns in the loop, s.compact(keep=…), or bound it."
_ADVICE_COMPACTED = "Lower keep= or max_tokens= of the loop's s.compact, or compact more often."


@dataclass(frozen=True, slots=True)
class _Loop:
    """Loop in the body of a program.

    Attributes:
        where: location of its first line.
        last_line: its last line.
        decided: lines whose decisions may end the loop: the test of a `while`, all lines of a
            `while True`, no lines of a `for`.
        helpers: (file, name) of each function that the body calls inside this loop and nowhere
            else.
        called_once: the helpers that have only one call in the loop.
    """

    where: Location
    last_line: int
    decided: range
    helpers: frozenset[tuple[str, str]]
    called_once: frozenset[tuple[str, str]]

    def contains(self, where: Location | None) -> bool:
        return (
            where is not None
            and where.file == self.where.file
            and self.where.line <= where.line <= self.last_line
        )

    def adds(self, where: Location | None) -> bool:
        """Returns True if line `where` runs once per iteration, in the loop or in a helper."""
        return self.contains(where) or (
            where is not None and (where.file, where.function) in self.called_once
        )

    def compacts(self, graph: GraphRecord) -> bool:
        """Returns True if the loop or one of its helpers has a compaction."""
        return any(
            self.contains(node.where) or (node.where.file, node.where.function) in self.helpers
            for node in graph.nodes
            if isinstance(node.node, Compact) and node.where is not None
        )


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Prompt of a generation or selection.

    Attributes:
        node: the generation or selection.
        tokens: tokens of the prompt.
        answer: maximum number of tokens of the answer.
    """

    node: GraphNode
    tokens: int
    answer: int


def find_outgrowing_loops(
    body: Callable[..., UserValue],
    graph: GraphRecord,
    context: int,
    count: Callable[[str], int],
    unset_max_tokens: int,
) -> list[Finding]:
    """Returns a finding for each loop of a body whose prompts and answers exceed the context.

    Args:
        graph: graph of the program.
        context: tokens of the longest text that the model takes.
        count: counts the tokens of a text.
        unset_max_tokens: tokens of an answer whose generation sets no `max_tokens`.
    """
    loops = _loops_of(body)
    found: dict[_Loop, Finding] = {}
    for way in graph.ways if loops else ():
        asked = _measure_prompts(graph, way, count, unset_max_tokens)
        for loop in loops:
            inside = [each for each in asked if loop.adds(each.node.where)]
            full = _first_full_iteration(inside, context)
            if full is None and _is_endless(graph, loop):
                full = _predict_full_iteration(inside, context)
            if full is not None and not any(each.contains(loop.where) for each in found):
                iteration, growth = full
                found[loop] = Finding(
                    "outgrows-context",
                    f"each iteration adds up to {growth:,} tokens; the text no longer fits into the context of "
                    f"{context:,} in iteration {iteration:,}.",
                    loop.where,
                    _ADVICE_COMPACTED if loop.compacts(graph) else _ADVICE,
                )
    return list(found.values())


def _loops_of(body: Callable[..., UserValue]) -> list[_Loop]:
    """Returns the loops of a body, outer ones first."""
    try:
        lines, first = inspect.getsourcelines(body)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return []
    code = inspect.unwrap(body).__code__
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            line = node.lineno + first - 1
            last = (node.end_lineno or node.lineno) + first - 1
            where = Location(code.co_filename, line, code.co_qualname)
            helpers, once = _find_helpers(node, tree, inspect.unwrap(body))
            found.append(_Loop(where, last, _deciding_lines(node, first), helpers, once))
    return found


def _find_helpers(
    loop: ast.AST, tree: ast.AST, body: Callable[..., UserValue]
) -> tuple[frozenset[tuple[str, str]], frozenset[tuple[str, str]]]:
    """Returns `_Loop.helpers` and `_Loop.called_once` of a loop in a body."""
    inside, everywhere = _count_calls(loop), _count_calls(tree)
    found = {
        place: count
        for name, count in inside.items()
        if count == everywhere[name] and (place := _place_of_helper(name, tree, body))
    }
    return frozenset(found), frozenset(place for place, count in found.items() if count == 1)


def _count_calls(tree: ast.AST) -> Counter[str]:
    """Counts the calls of functions by name."""
    calls = (each.func for each in ast.walk(tree) if isinstance(each, ast.Call))
    return Counter(each.id for each in calls if isinstance(each, ast.Name))


def _place_of_helper(
    name: str, tree: ast.AST, body: Callable[..., UserValue]
) -> tuple[str, str] | None:
    """Returns the file and the qualified name of the function that a name means in a body, or None
    if it means no Python function.
    """
    code = body.__code__
    for each in ast.walk(tree):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name == name:
            return code.co_filename, f"{code.co_qualname}.<locals>.{name}"
    known = inspect.getclosurevars(body)
    found = known.nonlocals.get(name, known.globals.get(name))
    if not inspect.isfunction(found):
        return None
    return found.__code__.co_filename, found.__code__.co_qualname


def _deciding_lines(loop: ast.For | ast.AsyncFor | ast.While, first: int) -> range:
    """Returns `_Loop.decided` of a loop in a function whose source begins at line `first`."""
    if not isinstance(loop, ast.While):
        return range(0)
    end = loop if isinstance(loop.test, ast.Constant) else loop.test
    return range(loop.lineno + first - 1, (end.end_lineno or loop.lineno) + first)


def _is_endless(graph: GraphRecord, loop: _Loop) -> bool:
    """Returns True if a loop ends only by decisions made during a run, and has no compaction."""
    inside = [node for node in graph.nodes if loop.contains(node.where)]
    return (
        not graph.complete
        and any(isinstance(node.node, Branching) and node.line in loop.decided for node in inside)
        and not loop.compacts(graph)
    )


def _iterations(prompts: Sequence[_Prompt]) -> Mapping[tuple[object, ...], list[_Prompt]]:
    """Groups the prompts of a loop by generation: each group has one prompt for each iteration."""
    found: dict[tuple[object, ...], list[_Prompt]] = defaultdict(list)
    for each in prompts:
        found[each.node.where, each.node.path].append(each)
    return found


def _first_full_iteration(prompts: Sequence[_Prompt], context: int) -> tuple[int, int] | None:
    """Returns the number of the first iteration, from the second on, that does not fit into the
    context, and the largest growth from one iteration to the next. Returns None if all of these
    iterations fit.
    """
    for iterations in _iterations(prompts).values():
        for i, each in enumerate(iterations):
            if i and each.tokens + each.answer > context:
                return i + 1, max(_growths(iterations))
    return None


def _predict_full_iteration(prompts: Sequence[_Prompt], context: int) -> tuple[int, int] | None:
    """Predicts the result of `_first_full_iteration` for a loop that keeps growing by the largest
    growth measured so far. Returns None if the loop does not grow.
    """
    for iterations in _iterations(prompts).values():
        growth = max(_growths(iterations), default=0)
        if growth > 0:
            left = context - iterations[-1].tokens - iterations[-1].answer
            return len(iterations) + math.floor(left / growth) + 1, growth
    return None


def _growths(iterations: Sequence[_Prompt]) -> list[int]:
    return [after.tokens - before.tokens for before, after in itertools.pairwise(iterations)]


@dataclass(slots=True)
class _BranchSize:
    """Size of a branch's text in tokens.

    Attributes:
        tokens: tokens so far.
        at_fork: tokens at the fork of the branch.
        ends: role and size at the end of each turn.
        answer: maximum number of tokens of the last answer.
        marks: for each mark, the size and the number of turns there.
    """

    tokens: int = 0
    at_fork: int = 0
    ends: list[tuple[str, int]] = field(default_factory=list)
    answer: int = 0
    marks: list[tuple[int, int]] = field(default_factory=list)

    def fork(self) -> _BranchSize:
        return _BranchSize(self.tokens, self.tokens, list(self.ends), self.answer)

    def compact(self, keep: int) -> None:
        """Reduces the text to the system turn, the summary and the last `keep` turns. Also drops
        the two turns at the end, which ask for the summary.
        """
        ends = self.ends[:-2]
        first = len(ends) - keep
        system = [end for end in ends[:1] if end[0] == "system"]
        start = ends[first - 1][1] if first else 0
        kept = [(role, end - start) for role, end in ends[first:]]
        size = (system[0][1] if system else 0) + self.answer
        self.ends = [*system, ("user", size), *((role, size + end) for role, end in kept)]
        self.tokens = self.ends[-1][1]


def _measure_prompts(
    graph: GraphRecord, way: Way, count: Callable[[str], int], unset_max_tokens: int
) -> list[_Prompt]:
    """Returns the prompts on a traced path. Leaves out prompts that ask for a summary, because they
    are shorter than the prompts before them.
    """
    sizes: dict[Path, _BranchSize] = defaultdict(_BranchSize)
    found: dict[int, _Prompt] = {}
    last: dict[Path, int] = {}
    for i in way.nodes:
        node = graph.nodes[i]
        size = sizes[node.path]
        match node.node:
            case Text(text):
                size.tokens += count(text)
            case Gen(params=params):
                limit = params.max_tokens
                size.answer = unset_max_tokens if isinstance(limit, Unset) else limit or 0
                found[i] = _Prompt(node, size.tokens, size.answer)
                last[node.path] = i
                size.tokens += size.answer
            case Select(choices=choices):
                longest = max(map(count, choices), default=0)
                found[i] = _Prompt(node, size.tokens, longest)
                size.tokens += longest
            case TurnEnd(role):
                size.ends.append((role, size.tokens))
            case Compact(keep):
                found.pop(last[node.path], None)
                size.compact(keep)
            case Fork(branches):
                for number in range(len(branches)):
                    sizes[*node.path, i, number] = size.fork()
            case Join(mode="concate_and_append"):
                size.tokens += sum(_added_tokens(sizes, node.joins))
            case Mark():
                size.marks.append((size.tokens, len(size.ends)))
            case Rollback(mark):
                size.tokens, turns = size.marks[mark]
                del size.ends[turns:]
    return list(found.values())


def _added_tokens(sizes: Mapping[Path, _BranchSize], joined: Sequence[Path]) -> Iterator[int]:
    for path in joined:
        yield sizes[path].tokens - sizes[path].at_fork
