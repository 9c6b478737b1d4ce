"""Finds out why tokens of a prompt were not in the radix tree, once per request, at admission."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from sglang_lite.protocol.trace import MissReason
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace
from sglang_lite.runtime.kv_cache.radix import Match, RadixTree

_AROUND: Final = 4  # tokens shown before the position of the miss
_SHOWN: Final = 12  # tokens shown from that position on
_NAMESPACES: Final = 16  # maximum number of other namespaces to search
_NONE: Ints = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Miss:
    """Reason why tokens of a prompt were not cached.

    Attributes:
        reason: kind of reason, as in CacheMiss.
        at: position in the prompt, in tokens, that the reason refers to.
        uncached: prompt tokens from the first computed one on; empty if no token was cached.
        now: prompt tokens around the position.
        before: cached tokens at the position, if any.
    """

    reason: MissReason
    at: int
    uncached: Ints
    now: Ints
    before: Ints


def find_miss(
    tree: RadixTree,
    prompt: Ints,
    usable: int,
    match: Match,
    cached: int,
    space: PrefixSpace,
    *,
    paused: bool,
    reveal_others: bool,
) -> Miss:
    """Finds the reason why a prompt was not fully cached.

    Args:
        tree: the radix tree.
        prompt: token ids of the prompt.
        usable: number of prompt tokens that could have been cached.
        match: cached prefix of these tokens.
        cached: number of tokens that need not be computed.
        space: part of the cache that holds the request's prefixes.
        paused: whether the request's program was paused and gave up pages meanwhile.
        reveal_others: whether the reason may reveal other namespaces and cached text.
    """
    at = cached
    before = _NONE
    end = len(match.pages) * tree.page_size
    tokens = space.tree_ids(prompt[:usable])
    rest = tokens[end:]
    other = match.tail.node if match.tail is not None else match.node.newest_child
    reason: MissReason = "never_seen"
    if tree.remembers_evicted_page(match.node, rest):
        reason = "paused" if paused else "evicted"
    elif reveal_others and _is_cached_elsewhere(tree, tokens, end, space.namespace):
        reason = "other_namespace"
    elif other is not None and (end or match.tail is not None):
        has = other.leading_tokens(_SHOWN + (match.tail.count if match.tail else 0))
        length = min(len(has), len(rest))
        differ = np.flatnonzero(has[:length] != rest[:length])
        if len(differ):
            reason = "changed"
            at = end + int(differ[0])
            before = np.concatenate(
                (prompt[max(at - _AROUND, 0) : at], has[int(differ[0]) :][:_SHOWN])
            )
        elif len(rest) < tree.page_size:
            reason = "page"
    elif len(rest) < tree.page_size:
        reason = "page"
    now = prompt[max(at - _AROUND, 0) : at + _SHOWN].copy()
    uncached = prompt[cached:].copy() if cached else _NONE
    return Miss(reason, at, uncached, now, before if reveal_others else _NONE)


def continued_slot_miss(prompt: Ints, cached: int) -> Miss:
    """Returns the reason why tokens had to be computed for a prompt that continues in the slot of
    another request.
    """
    now = prompt[max(cached - _AROUND, 0) : cached + _SHOWN].copy()
    return Miss("continued", cached, prompt[cached:].copy(), now, _NONE)


def _is_cached_elsewhere(tree: RadixTree, tokens: Ints, cached: int, namespace: str) -> bool:
    """Returns whether another namespace has cached more than `cached` of the tokens."""
    others = tree.newest_namespaces(_NAMESPACES)
    return any(tree.cached_length(tokens, name) > cached for name in others if name != namespace)
