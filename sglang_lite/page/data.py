"""Converts the trace records of runs to the data that page.js reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from sglang_lite.notebook.markup import replace_unprintable
from sglang_lite.protocol import (
    CacheMiss,
    Generation,
    Selection,
    TraceHead,
    TraceNode,
    Usage,
    total_usage,
)

LONGEST_TEXT: Final = 20_000  # maximum number of characters of a node on the page
_WHY: Final = {
    "never_seen": ("never seen", "No prompt that the cache has seen begins so."),
    "evicted": ("evicted", "It was in the cache and was dropped, for want of room or by a flush."),
    "paused": (
        "evicted in a pause",
        "It was in the cache and was dropped while the program paused.",
    ),
    "no_state": (
        "no state",
        "The cache has it, but no state behind it, which a model with linear attention needs.",
    ),
    "other_namespace": ("another namespace", "Another namespace of the cache has it."),
    "changed": ("changed", "The cache has another text from there on."),
    "page": ("less than a page", "Less than a page is left, and the cache keeps whole pages."),
    "continued": (
        "continued",
        "It continues in place behind another generation, and the rest is new.",
    ),
    "compacted": ("compacted", "s.compact() has replaced the text before it."),
    "on_host": ("on the host", "The host's memory has it, but computing was faster than copying."),
    "on_disk": (
        "in files",
        "Files have it, but computing was faster than reading, or the host had no room for it.",
    ),
    "disabled": ("no cache", "The engine keeps no prefixes."),
}


def run_data(head: TraceHead, nodes: Sequence[TraceNode]) -> dict[str, object]:
    """Converts a run to the data that the page's script reads."""
    return {
        "title": format_run_title(nodes),
        "backend": replace_surrogates(f"{head.backend} {head.model}"),
        "arguments": [
            (replace_surrogates(name), replace_surrogates(text)) for name, text in head.arguments
        ],
        "totals": run_totals(head, nodes),
        "seconds": head.seconds,
        "nodes": [_node_data(node) for node in nodes],
    }


def format_run_title(nodes: Sequence[TraceNode]) -> str:
    """Returns a title with the program and file of a run, or "A run" if they are not known."""
    place = next((node.where for node in nodes if node.where is not None), None)
    return "A run" if place is None else replace_unprintable(f"{place[2]} ({Path(place[0]).name})")


def sum_node_usage(head: TraceHead, nodes: Sequence[TraceNode]) -> Usage:
    """Sums the usage of all nodes, including those that failed or were rolled back. `total_s` is
    the duration of the run.
    """
    usages = [result.usage for node in nodes for result in node.results]
    failed = [
        answer.usage for node in nodes for attempt in node.attempts for answer in attempt.answers
    ]
    thrown_away = sum(node.thrown_away for node in nodes)
    total = total_usage([*usages, *failed])
    return msgspec.structs.replace(total, total_s=head.seconds, thrown_away_tokens=thrown_away)


def run_totals(head: TraceHead, nodes: Sequence[TraceNode]) -> list[tuple[str, str]]:
    """Returns the totals of a run, such as nodes, tokens and time, as pairs of a name and a
    formatted number.
    """
    usage = sum_node_usage(head, nodes)
    branches = len({node.path for node in nodes})
    counts = {
        "nodes": len(nodes),
        "branches": branches,
        "prompt tokens": usage.prompt_tokens,
        "cached": usage.cached_tokens,
        "generated": usage.completion_tokens,
        "forced": usage.forced_tokens,
        "thrown away": usage.thrown_away_tokens,
    }
    return [
        *((name, f"{count:,}") for name, count in counts.items()),
        ("time", f"{usage.total_s:.3f} s"),
    ]


def _node_data(node: TraceNode) -> dict[str, Any]:
    first = node.results[0] if node.results else None
    pieces = []
    remaining = LONGEST_TEXT
    for text, origin in node.pieces:
        pieces.append((replace_surrogates(text[:remaining]), origin))
        remaining = max(remaining - len(text), 0)
    return {
        "kind": node.kind,
        "path": node.path,
        "place": node.place,
        "name": None if node.name is None else replace_surrogates(node.name[:200]),
        "where": None
        if node.where is None
        else replace_surrogates(f"{node.where[0]}:{node.where[1]} in {node.where[2]}"),
        "pieces": pieces,
        "cut": max(len(node.text) - LONGEST_TEXT, 0),
        "start": node.start,
        "end": node.end,
        # fields that are 0 included
        "usage": msgspec.structs.asdict(node.usage) if node.results else None,
        "thrown": node.thrown_away,
        "finish": _format_finish_reason(first) if isinstance(first, Generation) else None,
        "cost": _reported_cost(first),
        "miss": _cache_miss_data(node.miss),
        "choices": _choice_shares(node.results),
        "tokens": _token_data(first, node.token_texts) if isinstance(first, Generation) else (),
        "sure": _certainty_data(first) if isinstance(first, Generation) else None,
        "attempts": [
            {
                "error": replace_surrogates(each.error),
                "texts": [
                    replace_surrogates(answer.text[:LONGEST_TEXT]) for answer in each.answers
                ],
            }
            for each in node.attempts
        ],
        "error": None if node.error is None else replace_surrogates(node.error),
        "rejected": node.rejected,
        "adapter": None if node.adapter is None else replace_surrogates(node.adapter),
        "image": replace_surrogates(node.image[:200]),
        "thumbnail": node.thumbnail if node.thumbnail.startswith("data:image/jpeg;base64,") else "",
    }


def _format_finish_reason(generation: Generation) -> str:
    matched = "" if generation.matched is None else f" {generation.matched!r:.80}"
    return replace_surrogates(f"{generation.finish_reason}{matched}")


def _reported_cost(result: Generation | Selection | None) -> float | None:
    """Returns the cost in dollars, or None if the backend does not report it."""
    cost = None if result is None else result.meta.get("cost")
    return cost if isinstance(cost, int | float) else None


def _cache_miss_data(miss: CacheMiss | None) -> dict[str, str] | None:
    if miss is None:
        return None
    short, long = _WHY[miss.reason]
    at = f"From token {miss.at:,} on. {long}"
    return {
        "short": f"{short} at token {miss.at:,}",
        "long": at,
        "now": replace_surrogates(miss.now),
        "before": replace_surrogates(miss.before),
    }


def _choice_shares(results: Sequence[Generation | Selection]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for result in results:
        if (
            isinstance(result, Selection)
            and result.scores
            and all(score.logprobs for score in result.scores)
        ):
            found += [
                (replace_surrogates(text[:200]), share) for text, share in result.probs.items()
            ]
    return found


def _token_data(generation: Generation, texts: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the data of each token: its id and, if known, its text, alternatives and three
    log-probabilities. "drawn" is the log-probability with which the token was sampled, and "own"
    the model's own. "allowed" is that of all tokens that the constraint allowed there.

    Args:
        texts: texts of the tokens; empty if they are not known.
    """
    logprobs = generation.output_logprobs
    scores = generation.scores
    found: list[dict[str, Any]] = [{"id": token} for token in generation.token_ids]
    for each, text in zip(found, texts):
        each["text"] = replace_surrogates(text)
    for each, entry in zip(found, logprobs):
        top = [
            (replace_surrogates(text or str(token)), logprob) for logprob, token, text in entry.top
        ]
        each |= {"id": entry.token_id, "drawn": entry.logprob, "top": top}
        each |= {} if entry.text is None else {"text": replace_surrogates(entry.text)}
    start = 0
    scored = () if scores is None else zip(scores.logprobs, scores.allowed, scores.ends)
    for each, (own, allowed, end) in zip(found, scored):
        each |= {
            "text": replace_surrogates(generation.text[start:end]),
            "own": own,
            "allowed": allowed,
        }
        start = end
    return found


def _certainty_data(generation: Generation) -> dict[str, float] | None:
    """Returns two log-probabilities: "logprob" of a generation's text under its constraint, and
    "mass" of all text that the constraint allowed, according to the model. Returns None if the
    tokens have no scores.
    """
    scores = generation.scores
    if scores is None or None in scores.logprobs:
        return None
    mass = math.fsum(each for each in scores.allowed if each is not None)
    return {
        "logprob": math.fsum(each for each in scores.logprobs if each is not None) - mass,
        "mass": mass,
    }


def replace_surrogates(text: str) -> str:
    """Replaces lone surrogates in a text, because they can't be encoded."""
    return text.encode("utf-8", "replace").decode()
