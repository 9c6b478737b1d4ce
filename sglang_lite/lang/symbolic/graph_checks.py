"""Checks that find faults of a program in its graph, without running the program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from sglang_lite.constraints.kinds import language_for_constraint
from sglang_lite.constraints.matching import may_contain
from sglang_lite.lang.backend.base import (
    Backend,
    check_adapter,
    unsupported_feature_error,
    unsupported_medium_error,
)
from sglang_lite.lang.backend.capabilities import Demands
from sglang_lite.lang.expressions import number_as_regex
from sglang_lite.lang.symbolic.hidden_fields import find_hidden_fields
from sglang_lite.program.drawing import label
from sglang_lite.program.graph import GraphNode, GraphRecord, Picture, Way
from sglang_lite.program.nodes import (
    Fork,
    Gen,
    GrammarBegin,
    ImagePart,
    Path,
    Rollback,
    Select,
    Text,
)
from sglang_lite.program.prefixes import common_prefix_length
from sglang_lite.protocol import (
    CapabilityError,
    Choices,
    Constraint,
    ConstraintError,
    Continuation,
    Location,
    Number,
    Unset,
)
from sglang_lite.protocol.record import Record

_MAX_FIELDS: Final = 6  # maximum number of fields listed in a finding


class Finding(Record, frozen=True):
    """Fault found in a program.

    Attributes:
        code: kind of the fault (docs/graph.md lists them).
        message: description of the fault.
        where: line of the user's code, or None if unknown.
        advice: suggested correction.
    """

    code: str
    message: str
    where: Location | None = None
    advice: str = ""

    def __str__(self) -> str:
        location = f"{self.where.file}:{self.where.line}: " if self.where is not None else ""
        return f"{location}{self.code}: {self.message}{' ' + self.advice if self.advice else ''}"


def check_graph(graph: GraphRecord, backend: Backend | None) -> tuple[Finding, ...]:
    """Runs all checks and returns their findings, ordered by line and without duplicates.

    Args:
        backend: backend whose support for each node is checked, or None.
    """
    found = (
        *_find_errors(graph),
        *_find_unread_variables(graph),
        *_find_unreachable_lines(graph),
        *_find_impossible_stops(graph),
        *_find_blanks_before_generations(graph),
        *_find_unsupported_nodes(graph, backend),
        *_find_hidden_tools(graph),
        *_find_dropped_tools(graph),
        *_find_hidden_fields(graph, backend),
        *_find_changing_texts(graph),
    )
    # If several paths have the same finding, the first one is kept.
    once = {(each.code, each.where, each.message): each for each in reversed(found)}
    return tuple(sorted(once.values(), key=_finding_position))


def _finding_position(finding: Finding) -> tuple[str, int]:
    return finding.where[:2] if finding.where is not None else ("", 0)


def _find_errors(graph: GraphRecord) -> Iterator[Finding]:
    for way in graph.ways:
        problem = way.problem
        # a TraceError is a limit of tracing, not a fault of the program
        if problem is not None and problem.ours and problem.kind != "TraceError":
            code = "unknown-variable" if problem.kind == "UnknownVariableError" else "error"
            advice = problem.hint
            if way.outcomes:
                advice += f" It happens where {_outcomes_text(graph, way)}."
            yield Finding(code, problem.message, problem.where, advice.strip())


def _outcomes_text(graph: GraphRecord, way: Way) -> str:
    """Describes in words the outcomes of the decisions on a traced path."""
    branchings = [node for i in way.nodes if (node := graph.nodes[i]).kind == "Branching"]
    words = []
    for node, outcome in zip(branchings, way.outcomes):
        text = node.node.outcomes[outcome]  # type: ignore[union-attr] # it is a Branching
        words.append(f"{label(node).removeprefix('if ').removesuffix('?')} is {text}")
    return ", ".join(words)


def _find_unread_variables(graph: GraphRecord) -> Iterator[Finding]:
    """Yields findings for variables whose value is never read. In the main branch and in joined
    branches, reports only values that are replaced before they are read, because the caller can
    read all others.
    """
    read = set(graph.read)
    for way in graph.ways:
        nodes = [(i, graph.nodes[i]) for i in way.nodes]
        if way.ended != "returned" or any(isinstance(node.node, Rollback) for _, node in nodes):
            continue  # variables removed by a rollback are set again on purpose
        yield from _find_replaced_variables(nodes, read)
        if not way.returns:  # the return value may contain the branches
            yield from _find_lost_variables(nodes, read)


def _find_replaced_variables(
    nodes: Sequence[tuple[int, GraphNode]], read: set[int]
) -> Iterator[Finding]:
    last: dict[tuple[Path, str], tuple[int, GraphNode]] = {}
    for i, node in nodes:
        if node.name is None:
            continue
        before, other = last.get((node.path, node.name), (i, node))
        last[node.path, node.name] = i, node
        if before not in read and other.line != node.line:  # in a loop, only the text may be wanted
            yield Finding(
                "unread-variable",
                f"{node.name!r} is replaced (line {node.line}) before it is read.",
                other.where,
                "Give one of the two another name.",
            )


def _find_lost_variables(
    nodes: Sequence[tuple[int, GraphNode]], read: set[int]
) -> Iterator[Finding]:
    """Yields findings for variables that are never read and belong to branches that are never
    joined. Skips forks with a single branch: they may come from `s.copy()`, which adds its
    variables to `s`.
    """
    forks = {i: node.node for i, node in nodes if isinstance(node.node, Fork)}
    joined = {path for _, node in nodes for path in node.joins}
    for i, node in nodes:
        if (
            node.name is None
            or i in read
            or not node.path
            or any(node.path[: len(path)] == path for path in joined)
        ):
            continue
        if all(fork in forks and len(forks[fork].branches) > 1 for fork in node.path[::2]):
            yield Finding(
                "unread-variable",
                f"{node.name!r} can't be read: its branch is neither joined nor read from.",
                node.where,
                "Call join() on the fork's group, or read it from the branch.",
            )


def _find_unreachable_lines(graph: GraphRecord) -> Iterator[Finding]:
    for where in graph.unreached:
        yield Finding(
            "unreachable",
            "no way through the body reaches this line.",
            where,
            "Remove it, or correct its condition.",
        )


def _find_impossible_stops(graph: GraphRecord) -> Iterator[Finding]:
    for node in graph.nodes:
        record = node.node
        if (
            not isinstance(record, Gen)
            or record.constraint is None
            or isinstance(record.params.stop, Unset)
        ):
            continue
        for stop in record.params.stop:
            try:
                never = may_contain(record.constraint, stop) is False
            except ConstraintError:  # reported by `_find_unsupported_nodes`
                continue
            if never:
                yield Finding(
                    "stop-never-comes",
                    f"{record.name or 'gen'!r} can never reach stop={stop!r}: its constraint forbids it.",
                    record.where,
                    "Leave the stop out, as the constraint ends the text, or allow it there.",
                )


def _find_blanks_before_generations(graph: GraphRecord) -> Iterator[Finding]:
    """Yields findings for unconstrained generations after a text that ends with a blank. Most
    tokens that begin a word include the blank before it, so they can't follow such a text.
    """
    for way in graph.ways:
        last: dict[Path, GraphNode] = {}
        for node in (graph.nodes[i] for i in way.nodes):
            before = last.get(node.path)
            last[node.path] = node
            record = node.node
            if (
                isinstance(record, Gen)
                and record.constraint is None
                and not node.tools
                and record.params.heal is not True
                and before is not None
                and isinstance(before.node, Text)
                and before.node.text.endswith(" ")
            ):
                yield Finding(
                    "blank-before-generation",
                    f"the text before {record.name or 'gen'!r} ends with a blank, which most words begin with.",
                    record.where,
                    "Leave the blank out, or use gen(heal=True).",
                )


def _find_unsupported_nodes(graph: GraphRecord, backend: Backend | None) -> Iterator[Finding]:
    for node in graph.nodes:
        try:
            if backend is not None:
                _check_support(backend, node)
            constraint = getattr(node.node, "constraint", None)
            if constraint is not None and (backend is None or backend.enforces) and not node.uses:
                language_for_constraint(constraint)
        except (CapabilityError, ConstraintError) as error:
            yield Finding("refused", error.message, node.where, error.hint)


def _check_support(backend: Backend, node: GraphNode) -> None:
    """Raises CapabilityError if the backend does not support the node."""
    can = backend.capabilities
    record = node.node
    match record:
        case Gen():
            constraint: Constraint | None = record.constraint
            if isinstance(constraint, Number) and Number not in can.constraints:
                constraint = number_as_regex(constraint)
            backend.check(record, Demands("gen", record.params, constraint), record.where)
        case Select():
            check_adapter(backend, record, record.lora_path, record.where)
            scores = bool(record.temperature) or record.method != "token_length_normalized"
            choices = Choices(record.choices or ("a", "b"))
            backend.check(
                record, Demands("select", constraint=choices, scores=scores), record.where
            )
        case GrammarBegin():
            if Continuation not in can.constraints:
                instead = "Write all of it with one gen(constraint=…)."
                raise unsupported_feature_error(
                    backend, record, "a grammar over several nodes", instead, record.where
                )
        case ImagePart(image=image) if not can.takes(image.kind):
            raise unsupported_medium_error(backend, record, image.kind, node.where)
        case Picture(medium=kind) if not can.takes(kind):
            raise unsupported_medium_error(backend, record, kind, node.where)


def _find_hidden_tools(graph: GraphRecord) -> Iterator[Finding]:
    texts = [node.node.text for node in graph.nodes if isinstance(node.node, Text)]
    for node in graph.nodes:
        hidden = [tool for tool in node.tools if not any(tool in text for text in texts)]
        if hidden and node.role != "assistant":
            yield Finding(
                "hidden-tools",
                f"{node.name or 'gen'!r} does not see {', '.join(hidden)} outside an assistant's turn.",
                node.where,
                "Write turns: s += sgl.user(…), then s += sgl.assistant(sgl.gen(…)); or write "
                "sglang_lite.lang.agent.describe(tools, s) into the prompt.",
            )


def _find_dropped_tools(graph: GraphRecord) -> Iterator[Finding]:
    """Yields findings for generations in turns whose prompt lacks the tools that an earlier prompt
    showed. The two prompts then differ from the beginning, so the cache can't be used.
    """
    for way in graph.ways:
        shown: dict[Path, GraphNode] = {}  # the last generation with tools, by its branch
        for node in (graph.nodes[i] for i in way.nodes):
            if not isinstance(node.node, Gen) or node.role != "assistant":
                continue
            if node.tools:
                shown[node.path] = node
                continue
            size = len(node.path)
            ancestors = [node.path[:length] for length in range(size, -1, -1)]
            earlier = next((shown[path] for path in ancestors if path in shown), None)
            if earlier is not None:
                yield Finding(
                    "dropped-tools",
                    f"{node.name or 'gen'!r} drops the tools that {earlier.name or 'gen'!r} shows, so its prompt is "
                    "computed again from the beginning.",
                    node.where,
                    'Show them, and allow no call: gen(tools=[…], tool_choice="none").',
                )


def _find_hidden_fields(graph: GraphRecord, backend: Backend | None) -> Iterator[Finding]:
    # an API receives the schema and shows it to its model
    if backend is not None and not backend.enforces:
        return
    for hidden in find_hidden_fields(graph):
        node = hidden.node
        names = ", ".join(hidden.fields[:_MAX_FIELDS])
        more = ", …" if len(hidden.fields) > _MAX_FIELDS else ""
        yield Finding(
            "hidden-fields",
            f"no text before {node.name or 'gen'!r} names one of its fields: {names}{more}.",
            node.where,
            f"Show the model the type: write {{sgl.describe({hidden.type_name or '…'})}} into the turn before it.",
        )


def _find_changing_texts(graph: GraphRecord) -> Iterator[Finding]:
    for change in graph.changes:
        first, second = _difference_excerpts(change.first, change.second)
        yield Finding(
            "changing-text",
            f"the text changes with every run: {first!r}, then {second!r}.",
            graph.nodes[change.node].where,
            "No text after it is found in the prompt cache: put it last, sort it, or pass it as an argument.",
        )


def _difference_excerpts(first: str, second: str) -> tuple[str, str]:
    """Returns excerpts of two texts. They begin shortly before the first difference."""
    same = common_prefix_length(first, second)
    start = max(same - 20, 0)
    return first[start : same + 40], second[start : same + 40]
