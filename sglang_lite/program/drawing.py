"""Drawings of a graph: as text, as SVG, and for Mermaid and Graphviz."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sglang_lite.notebook.markup import Markup, element, shorten_text
from sglang_lite.program.graph import (
    Branching,
    Call,
    Compact,
    Edge,
    GraphNode,
    GraphRecord,
    Picture,
    Value,
    Way,
)
from sglang_lite.program.nodes import (
    Fork,
    Gen,
    GrammarBegin,
    GrammarEnd,
    Join,
    Path,
    Rollback,
    ScopeBegin,
    ScopeEnd,
    Select,
    Text,
    TurnBegin,
    TurnEnd,
)
from sglang_lite.protocol import Unset
from sglang_lite.protocol.sampling import given_values

_LONGEST = 60  # maximum number of characters shown of a text


def label(node: GraphNode) -> str:
    """Returns a short description of a node."""
    match node.node:
        case Text(text):
            return f"text {_shorten(text)}"
        case Value():
            return f"value {{{node.uses[0].expression}}}" if node.uses else "value"
        case Picture(source):
            return f"image {_shorten(source)}"
        case Gen() | Select():
            return _answer_label(node)
        case TurnBegin(role):
            return f"{role} turn"
        case TurnEnd(role):
            return f"end of the {role} turn"
        case ScopeBegin(name):
            return f"scope {name}"
        case ScopeEnd(name):
            return f"end of the scope {name}"
        case GrammarBegin(constraint):
            return f"grammar {constraint!r:.{_LONGEST}}"
        case GrammarEnd():
            return "end of the grammar"
        case Fork(branches):
            return f"fork into {len(branches)}"
        case Join(mode=mode):
            return "join, texts appended" if mode == "concate_and_append" else "join"
        case Call(program):
            return f"call of {program}"
        case Branching(question):
            asked = ", ".join(use.expression for use in node.uses)
            return f"if {asked} {question}".rstrip() + "?"
        case Rollback():
            return "rollback"
        case Compact(keep, turns):
            return f"compact: {turns} turns dropped, {keep} kept"
    return node.kind.lower()


def _answer_label(node: GraphNode) -> str:
    record = node.node
    assert isinstance(record, Gen | Select)
    words = ["gen" if isinstance(record, Gen) else "select", record.name or "(no name)"]
    if isinstance(record, Select):
        words.append(
            f"of {len(record.choices)}: {', '.join(map(repr, record.choices)):.{_LONGEST}}"
        )
        if not isinstance(record.lora_path, Unset):
            words.append(f"lora_path={record.lora_path!r}")
    else:
        words += [
            f"{name}={value!r:.{_LONGEST}}" for name, value in given_values(record.params).items()
        ]
        if record.constraint is not None:
            words.append(f"{record.constraint!r:.{_LONGEST}}")
    words += [f"{use.into} from {{{use.expression}}}" for use in node.uses]
    if node.tools:
        words.append(f"tools: {', '.join(node.tools)}")
    return " ".join(words)


def _shorten(text: str) -> str:
    return (
        repr(text)
        if len(text) <= _LONGEST
        else f"{text[: _LONGEST - 20]!r}… ({len(text):,} characters)"
    )


def as_text(graph: GraphRecord) -> str:
    """Renders the graph as a listing with one line per node: id, branch, description, location.
    Nodes after a branching are indented.
    """
    return "\n".join([title(graph), *_listing_lines(graph, graph.ways, 0, 0)])


def title(graph: GraphRecord) -> str:
    """Returns a title for the graph: the program's name, the arguments that have no value yet, and
    the numbers of nodes and paths.
    """
    ways = (
        f"{len(graph.ways)} way{'s' * (len(graph.ways) > 1)}{'' if graph.complete else ', not all'}"
    )
    return f"{graph.program}({', '.join(graph.arguments)}): {len(graph.nodes)} nodes, {ways}"


def _listing_lines(
    graph: GraphRecord, ways: Sequence[Way], start: int, branching_count: int
) -> Iterator[str]:
    """Yields the lines for several traced paths from index `start` on. The paths are equal before
    that index and contain `branching_count` branchings there.
    """
    indent = "    " * branching_count
    for at in range(start, len(ways[0].nodes)):
        i = ways[0].nodes[at]
        node = graph.nodes[i]
        place = (
            ""
            if node.where is None
            else f"  [{node.where.file.rpartition('/')[2]}:{node.where.line}]"
        )
        branch = "".join(
            f"{fork}.{number} " for fork, number in zip(node.path[::2], node.path[1::2])
        )
        yield f"{i:4} {indent}{branch}{label(node)}{place}"
        if isinstance(node.node, Branching):
            for outcome, text in enumerate(node.node.outcomes):
                there = [
                    way
                    for way in ways
                    if way.outcomes[branching_count : branching_count + 1] == (outcome,)
                ]
                yield f"     {indent}  {text}:{'' if there else ' not followed'}"
                if there:
                    yield from _listing_lines(graph, there, at + 1, branching_count + 1)
            return
    if ways[0].problem is not None:
        yield f"     {indent}{ways[0].problem.kind}: {ways[0].problem.message}"
    if ways[0].ended == "cut":
        yield f"     {indent}… and so on"


def as_mermaid(graph: GraphRecord) -> str:
    """Returns a flowchart in Mermaid's syntax. Solid arrows show order, dotted ones data."""
    lines = ["flowchart TD"]
    for i, name in enumerate(_external_value_names(graph)):
        lines.append(f'  a{i}(["{_escape_for_mermaid(name)}"])')
    for i, node in enumerate(graph.nodes):
        text = _escape_for_mermaid(label(node))
        lines.append(
            f'  n{i}{{"{text}"}}' if isinstance(node.node, Branching) else f'  n{i}["{text}"]'
        )
    for edge, source in _edges_with_sources(graph):
        arrow = "-.->" if edge.kind == "data" else "-->"
        edge_label = f'|"{_escape_for_mermaid(edge.label)}"|' if edge.label else ""
        lines.append(f"  {source} {arrow}{edge_label} n{edge.target}")
    return "\n".join(lines) + "\n"


def _escape_for_mermaid(text: str) -> str:
    """Prepares a text for a quoted label: escapes all characters that are special in Mermaid or
    HTML.
    """
    printable = (
        text.encode("unicode_escape").decode().replace("\\\\", "\\")
        if not text.isprintable()
        else text
    )
    return "".join(f"#{ord(c)};" if c in '"#<>&`;\\' else c for c in printable)


def as_dot(graph: GraphRecord) -> str:
    """Returns a directed graph in Graphviz's DOT language. Solid edges show order, dashed ones
    data.
    """
    lines = ["digraph {", "  node [shape=box, fontname=monospace]"]
    for i, name in enumerate(_external_value_names(graph)):
        lines.append(f"  a{i} [label={_quote_for_dot(name)}, shape=ellipse]")
    for i, node in enumerate(graph.nodes):
        shape = ", shape=diamond" if isinstance(node.node, Branching) else ""
        lines.append(f"  n{i} [label={_quote_for_dot(label(node))}{shape}]")
    for edge, source in _edges_with_sources(graph):
        attributes = [f"label={_quote_for_dot(edge.label)}"] * bool(edge.label) + [
            "style=dashed"
        ] * (edge.kind == "data")
        lines.append(
            f"  {source} -> n{edge.target}" + (f" [{', '.join(attributes)}]" if attributes else "")
        )
    return "\n".join([*lines, "}"]) + "\n"


def _quote_for_dot(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _external_value_names(graph: GraphRecord) -> list[str]:
    """Returns the names of the values that don't come from a node."""
    used = [use.name for node in graph.nodes for use in node.uses if use.source is None]
    return list(dict.fromkeys([*graph.arguments, *used]))


def _edges_with_sources(graph: GraphRecord) -> Iterator[tuple[Edge, str]]:
    """Yields each edge with the name of its source in a drawing."""
    arguments = {name: f"a{i}" for i, name in enumerate(_external_value_names(graph))}
    uses = {use.expression: use.name for node in graph.nodes for use in node.uses}
    for edge in graph.edges:
        yield edge, f"n{edge.source}" if edge.source is not None else arguments[uses[edge.label]]


# size of a box, and the distance from one box to the next
_WIDTH = 300
_HEIGHT = 22
_ROW = 34
_COLUMN = 320
_MAX_DRAWN = 300  # maximum number of boxes
_CHARACTERS = 44  # maximum number of characters in a box
_COLOURS = {"Gen": "#fdecc4", "Select": "#f6deeb", "Branching": "#d5ecfa", "Call": "#cdeee3"}


def as_svg(graph: GraphRecord) -> Markup:
    """Draws the graph as SVG. Boxes are in order from top to bottom. Each branch, and each path
    after a branching, has its own column. Solid lines show order, dashed ones data.
    """
    boxes = _place_boxes(graph)
    lines = [
        _draw_line(boxes[source], boxes[f"n{edge.target}"], edge)
        for edge, source in _edges_with_sources(graph)
        if source in boxes and f"n{edge.target}" in boxes
    ]
    drawn = [_draw_box(at, text, colour) for at, text, colour in _box_labels(graph, boxes)]
    width, height = (max((at[i] for at in boxes.values()), default=0) for i in (0, 1))
    left_out = len(graph.nodes) + len(_external_value_names(graph)) - len(drawn)
    note = (
        [element("text", f"{left_out:,} more nodes", x=0, y=height + _ROW + 16)] if left_out else []
    )
    size = (width + _WIDTH + 2, height + _ROW * 2)
    return element(
        "svg",
        element("title", title(graph)),
        *lines,
        *drawn,
        *note,
        xmlns="http://www.w3.org/2000/svg",
        role="img",
        width=size[0],
        height=size[1],
        viewBox=f"-1 -1 {size[0]} {size[1]}",
        font_family="monospace",
        font_size=11,
        fill="currentColor",
        stroke="none",
    )


def _place_boxes(graph: GraphRecord) -> dict[str, tuple[int, int]]:
    """Returns the upper left corner of each box that is drawn, by the box's name in the drawing."""
    levels = dict[int, int]()
    columns = dict[tuple[int, Path], int]()
    first_way = {i: number for number, way in reversed([*enumerate(graph.ways)]) for i in way.nodes}
    before: dict[int, list[int]] = {}
    for edge in graph.edges:
        if edge.source is not None and edge.source < edge.target:
            before.setdefault(edge.target, []).append(edge.source)
    arguments = _external_value_names(graph)
    boxes = {f"a{i}": (i * _COLUMN, 0) for i in range(len(arguments))}
    for i, node in enumerate(graph.nodes[:_MAX_DRAWN]):
        levels[i] = 1 + max(
            (levels[each] for each in before.get(i, ())), default=0 if arguments else -1
        )
        column = columns.setdefault((first_way.get(i, 0), node.path), len(columns))
        boxes[f"n{i}"] = (column * _COLUMN, levels[i] * _ROW)
    return boxes


def _box_labels(
    graph: GraphRecord, boxes: Mapping[str, tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], str, str]]:
    """Yields the corner, text and colour of each box."""
    for i, name in enumerate(_external_value_names(graph)):
        yield boxes[f"a{i}"], name, "none"
    for i, node in enumerate(graph.nodes[:_MAX_DRAWN]):
        yield boxes[f"n{i}"], label(node), _COLOURS.get(node.kind, "#f5f6f8")


def _draw_box(at: tuple[int, int], text: str, colour: str) -> Markup:
    x, y = at
    ink = "currentColor" if colour == "none" else "#1b1f24"
    return element(
        "g",
        element("title", text),
        element(
            "rect", x=x, y=y, width=_WIDTH, height=_HEIGHT, rx=4, fill=colour, stroke="#7a8490"
        ),
        element(
            "text", shorten_text(text.replace("\n", " "), _CHARACTERS), x=x + 6, y=y + 15, fill=ink
        ),
    )


def _draw_line(source: tuple[int, int], target: tuple[int, int], edge: Edge) -> Markup:
    """Draws a line from the bottom of one box to the top of another. Lines for data are further to
    the right.
    """
    shift = _WIDTH - 30 if edge.kind == "data" else 20
    (x0, y0), (x1, y1) = (source[0] + shift, source[1] + _HEIGHT), (target[0] + shift, target[1])
    middle = (y0 + y1) / 2
    return element(
        "path",
        element("title", edge.label),
        d=f"M{x0} {y0}C{x0} {middle} {x1} {middle} {x1} {y1}",
        fill="none",
        stroke="#7a8490",
        stroke_dasharray="4 3" if edge.kind == "data" else None,
    )
