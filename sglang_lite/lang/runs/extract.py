"""Renders the trace of a run as HTML without scripts, for notebooks. Shows the text of the
branches, with the branches of a fork side by side.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypeAlias

from sglang_lite.notebook.markup import Markup, element, escape_content, notebook_html, shorten_text
from sglang_lite.page.data import run_totals
from sglang_lite.page.render import ORIGINS, read_resource
from sglang_lite.protocol import Generation, Selection, TokenScores, TraceNode

if TYPE_CHECKING:
    from sglang_lite.lang.runs.trace import Trace

_MAX_NODES: Final = 100  # maximum number of nodes
_LONGEST: Final = 2_000  # maximum number of characters of a node
_Path: TypeAlias = tuple[int, ...]


def render_extract(trace: Trace) -> Markup:
    """Renders the beginning of a trace: totals, a legend of the origins of its text, and the text.
    Text written by the chat template is folded under the name of its turn.
    """
    nodes = trace.nodes[:_MAX_NODES]
    branches = defaultdict[_Path, list[TraceNode]](list)
    for node in nodes:
        branches[node.path].append(node)
    found = {origin for node in nodes for _, origin in node.pieces}
    legend = [
        element("span", origin, class_=origin) + escape_content(" ")
        for origin in ORIGINS
        if origin in found
    ]
    more = len(trace.nodes) - len(nodes)
    note = f"{more:,} more nodes: state.trace() has them." if more else ""
    return notebook_html(
        element("style", Markup(read_resource("origins.css"))),
        element(
            "p", ", ".join(f"{name} {value}" for name, value in run_totals(trace.head, trace.nodes))
        ),
        element("p", *map(Markup, legend)),
        element("div", *_render_branch(branches, ()), class_="said"),
        *([element("p", note)] if note else []),
        scope="sglang-lite-trace",
    )


def _render_branch(branches: dict[_Path, list[TraceNode]], path: _Path) -> Iterator[Markup]:
    """Yields the nodes of a branch. A fork becomes one column for each of its branches."""
    nodes = branches.get(path, [])
    for i, node in enumerate(nodes):
        if node.kind == "fork":
            forked = [each for each in branches if each[:-1] == (*path, node.place)]
            columns = (
                element("div", *_render_branch(branches, each), class_="column") for each in forked
            )
            yield element("div", *columns, class_="columns")
        elif role := _template_title(nodes, i):
            edge = "end" if role.startswith("end ") else "begin"
            yield element("details", element("summary", role), node.text, class_=f"template {edge}")
        elif node.kind == "image":
            yield element("span", "[image]", class_="constant")
        else:
            yield from _render_node_text(node)
        if node.error is not None:
            yield element("div", f"{node.kind} {node.name or ''}: {node.error}", class_="error")


def _template_title(nodes: Sequence[TraceNode], i: int) -> str:
    """Returns the title of a text that the chat template inserted to begin or end a turn, or "" for
    any other text.

    Template text is recognised by sharing its turn's source location.
    """
    node = nodes[i]
    after = nodes[i + 1 : i + 2]
    before = nodes[max(i - 1, 0) : i]
    if node.kind != "text":
        return ""
    if after and after[0].kind == "turn_begin" and after[0].where == node.where:
        return after[0].name or ""
    if before and before[0].kind == "turn_end" and before[0].where == node.where:
        return f"end of {before[0].name}"
    return ""


def _render_node_text(node: TraceNode) -> Iterator[Markup]:
    """Yields the text of a node in HTML pieces. A piece ends where the origin of the text changes
    and, if token probabilities are known, after each token.
    """
    hints = dict(_token_probabilities(node.results[0], node.text)) if node.results else {}
    ends = sorted(hints)
    at = 0
    remaining = _LONGEST
    for text, origin in node.pieces:
        inside = [end - at for end in ends if at < end < at + len(text)]
        for start, end in zip([0, *inside], [*inside, len(text)]):
            piece = text[start:end][:remaining]
            token = (
                hints[ends[place]] if (place := bisect_left(ends, at + end)) < len(ends) else None
            )
            if piece:
                yield element(
                    "span", piece, class_=origin, title=_node_tooltip(node, origin, token)
                )
            remaining -= len(piece)
        at += len(text)
    if at > _LONGEST:
        yield element("span", f" … {at - _LONGEST:,} more characters")


def _node_tooltip(node: TraceNode, origin: str, token: str | None) -> str:
    first = node.results[0] if node.results else None
    parts = [
        " ".join(filter(None, (node.kind, node.name and shorten_text(node.name)))) + f": {origin}"
    ]
    if token is not None:
        parts.append(token)
    if (
        isinstance(first, Selection)
        and first.scores
        and all(score.logprobs for score in first.scores)
    ):
        parts += [f"{shorten_text(text)} {share:.0%}" for text, share in first.probs.items()]
    elif isinstance(first, Generation):
        parts.append(f"{node.usage.completion_tokens} tokens, {node.seconds:.3f} s")
        if drafted := first.meta.get("spec_draft_token_num"):
            parts.append(
                f"{first.meta.get('spec_accept_token_num')} of {drafted} drafted tokens came"
            )
    if node.where is not None:
        parts.append(f"line {node.where[1]}")
    return "\n".join(parts)


def _token_probabilities(answer: Generation | Selection, text: str) -> Iterable[tuple[int, str]]:
    """Returns the position where each token of a node's text ends, with the token's probability,
    formatted as text. Returns nothing if the backend reported no probabilities for this text.
    """
    if not isinstance(answer, Generation) or not text.startswith(answer.text):
        return ()
    if answer.scores is not None:
        return (
            (end, f"probability {share:.1%}")
            for end, share in _constrained_probabilities(answer.scores)
        )
    texts = [each.text or "" for each in answer.output_logprobs]
    if not "".join(texts).startswith(answer.text):
        return ()
    probable = [_format_probability(each.logprob) for each in answer.output_logprobs]
    return zip(accumulate(map(len, texts)), probable)


def _constrained_probabilities(scores: TokenScores) -> Iterator[tuple[int, float]]:
    for end, logprob, allowed in zip(scores.ends, scores.logprobs, scores.allowed):
        if logprob is not None and allowed is not None:
            yield end, math.exp(min(logprob - allowed, 0.0))


def _format_probability(logprob: float | None) -> str:
    return "" if logprob is None else f"probability {math.exp(logprob):.1%}"
