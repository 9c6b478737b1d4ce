"""Trace of a run as HTML for a notebook, without script: the text of its branches, those of a fork
side by side.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypeAlias

from sglang_lite.markup import Markup, cut, element, escape_content, fragment
from sglang_lite.page.data import totals
from sglang_lite.page.render import ORIGINS, resource
from sglang_lite.protocol import Generation, Selection, TokenScores, TraceNode

if TYPE_CHECKING:
    from sglang_lite.lang.runs.trace import Trace

_MAX_NODES: Final = 100  # maximum number of nodes
_LONGEST: Final = 2_000  # maximum number of characters of a node
_Path: TypeAlias = tuple[int, ...]


def extract(trace: Trace) -> Markup:
    """Beginning of a trace: totals, a legend of the origins of its text, and the text. Tokens of
    the chat template are folded behind the name of their turn.
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
    return fragment(
        element("style", Markup(resource("origins.css"))),
        element(
            "p", ", ".join(f"{name} {value}" for name, value in totals(trace.head, trace.nodes))
        ),
        element("p", *map(Markup, legend)),
        element("div", *_branch(branches, ()), class_="said"),
        *([element("p", note)] if note else []),
        scope="sglang-lite-trace",
    )


def _branch(branches: dict[_Path, list[TraceNode]], path: _Path) -> Iterator[Markup]:
    """Yields the nodes of a branch; behind a fork a column for each of its branches."""
    nodes = branches.get(path, [])
    for i, node in enumerate(nodes):
        if node.kind == "fork":
            forked = [each for each in branches if each[:-1] == (*path, node.place)]
            columns = (element("div", *_branch(branches, each), class_="column") for each in forked)
            yield element("div", *columns, class_="columns")
        elif role := _template_of(nodes, i):
            edge = "end" if role.startswith("end ") else "begin"
            yield element("details", element("summary", role), node.text, class_=f"template {edge}")
        elif node.kind == "image":
            yield element("span", "[image]", class_="constant")
        else:
            yield from _text(node)
        if node.error is not None:
            yield element("div", f"{node.kind} {node.name or ''}: {node.error}", class_="error")


def _template_of(nodes: Sequence[TraceNode], i: int) -> str:
    """Name of the turn if text that begins or ends it was written by the chat template, which
    stands at the turn's own line; else "".
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


def _text(node: TraceNode) -> Iterator[Markup]:
    """Yields the text of a node in pieces of one origin, of a scored generation in pieces of one
    token.
    """
    hints = dict(_token_hints(node.results[0], node.text)) if node.results else {}
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
                yield element("span", piece, class_=origin, title=_hint(node, origin, token))
            remaining -= len(piece)
        at += len(text)
    if at > _LONGEST:
        yield element("span", f" … {at - _LONGEST:,} more characters")


def _hint(node: TraceNode, origin: str, token: str | None) -> str:
    first = node.results[0] if node.results else None
    parts = [" ".join(filter(None, (node.kind, node.name and cut(node.name)))) + f": {origin}"]
    if token is not None:
        parts.append(token)
    if (
        isinstance(first, Selection)
        and first.scores
        and all(score.logprobs for score in first.scores)
    ):
        parts += [f"{cut(text)} {share:.0%}" for text, share in first.probs.items()]
    elif isinstance(first, Generation):
        parts.append(f"{node.usage.completion_tokens} tokens, {node.seconds:.3f} s")
        if drafted := first.meta.get("spec_draft_token_num"):
            parts.append(
                f"{first.meta.get('spec_accept_token_num')} of {drafted} drafted tokens came"
            )
    if node.where is not None:
        parts.append(f"line {node.where[1]}")
    return "\n".join(parts)


def _token_hints(answer: Generation | Selection, text: str) -> Iterable[tuple[int, str]]:
    """Pairs of a token's end in a node's text and its probability, if the backend reported both."""
    if not isinstance(answer, Generation) or not text.startswith(answer.text):
        return ()
    if answer.scores is not None:
        return ((end, f"probability {share:.1%}") for end, share in _scored(answer.scores))
    texts = [each.text or "" for each in answer.output_logprobs]
    if not "".join(texts).startswith(answer.text):
        return ()
    probable = [_probability(each.logprob) for each in answer.output_logprobs]
    return zip(accumulate(map(len, texts)), probable)


def _scored(scores: TokenScores) -> Iterator[tuple[int, float]]:
    for end, logprob, allowed in zip(scores.ends, scores.logprobs, scores.allowed):
        if logprob is not None and allowed is not None:
            yield end, math.exp(min(logprob - allowed, 0.0))


def _probability(logprob: float | None) -> str:
    return "" if logprob is None else f"probability {math.exp(logprob):.1%}"
