"""Reasons why a prompt's tokens were not in the prefix tree. Looked for once a request, at its admission."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sglang_lite.protocol.trace import MissReason
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.radix import Match, RadixTree

_AROUND: Final = 4  # tokens shown before the place
_SHOWN: Final = 12  # and from there on
_NAMESPACES: Final = 16  # looked at
_NONE: Ints = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Miss:
    """
    Attributes:
        reason: as in CacheMiss.
        at: tokens before the place.
        uncached: tokens of the prompt from the first one on that was computed; none where that is all.
        now: tokens of the prompt around the place.
        before: what the tree has there.
    """

    reason: MissReason
    at: int
    uncached: Ints
    now: Ints
    before: Ints


def find_miss(
    tree: RadixTree, prompt: Ints, usable: int, match: Match, cached: int, namespace: str, *, tell_others: bool
) -> Miss:
    """The reason for a prompt that was not all cached.

    Args:
        usable: how many of its tokens were looked up.
        match: what was found of those.
        cached: how many need not be computed.
        tell_others: tell of other namespaces, and what the tree has at the place.
    """
    at, before = cached, _NONE
    end = len(match.pages) * tree.page_size
    tokens = prompt[:usable]
    rest = tokens[end:]
    other = match.tail.node if match.tail is not None else match.node.newest
    reason: MissReason = "never_seen"
    if tree.was_evicted(match.node, rest):
        reason = "evicted"
    elif tell_others and _elsewhere(tree, tokens, end, namespace):
        reason = "other_namespace"
    elif other is not None and (end or match.tail is not None):
        has = other.following(_SHOWN + (match.tail.count if match.tail else 0))
        length = min(len(has), len(rest))
        differ = np.flatnonzero(has[:length] != rest[:length])
        if len(differ):
            reason, at = "changed", end + int(differ[0])
            before = np.concatenate((prompt[max(at - _AROUND, 0) : at], has[int(differ[0]) :][:_SHOWN]))
        elif len(rest) < tree.page_size:
            reason = "page"
    elif len(rest) < tree.page_size:
        reason = "page"
    now = prompt[max(at - _AROUND, 0) : at + _SHOWN].copy()
    uncached = prompt[cached:].copy() if cached else _NONE
    return Miss(reason, at, uncached, now, before if tell_others else _NONE)


def continued(prompt: Ints, cached: int) -> Miss:
    """The reason for a prompt that continues in the slot of another one."""
    now = prompt[max(cached - _AROUND, 0) : cached + _SHOWN].copy()
    return Miss("continued", cached, prompt[cached:].copy(), now, _NONE)


def _elsewhere(tree: RadixTree, tokens: Ints, cached: int, namespace: str) -> bool:
    """Tells whether another namespace has more of the tokens."""
    others = tree.newest_namespaces(_NAMESPACES)
    return any(tree.cached_length(tokens, name) > cached for name in others if name != namespace)
