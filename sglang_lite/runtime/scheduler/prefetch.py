"""Prefetches pages from lower tiers: the first pages of waiting requests, and the pages that paused
programs gave up. A program's pages are fetched shortly before it returns.
"""

from __future__ import annotations

from typing import Final

from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.scheduler.pauses import PausedBranch, Pauses

# a program is prefetched this long before its expected return; longer than copies take
_AHEAD_S: Final = 0.25
_EVERY_S: Final = 0.02  # between two looks at the pauses
_SPARE: Final = 8  # one in this many pages stays available


class Prefetch:
    """Prefetches into the device's free pages and the host's memory.

    Args:
        store: pages, tiers and radix tree.
        pauses: paused branches of programs.
    """

    def __init__(self, store: PrefixCache, pauses: Pauses) -> None:
        self._store = store
        self._pauses = pauses
        self._next = 0.0

    def read_ahead_for(self, request: Request) -> None:
        """Starts to read cached pages of a request's first tokens from files, because it may have
        to wait for its turn.
        """
        if self._store.tiers is not None:
            tokens = request.tokens
            token_s = self._pauses.token_s
            request.cache.fetch = self._store.tiers.read_ahead(tokens, request.space, token_s)

    def run(self) -> None:
        """Fetches pages given up by paused programs that are expected soon, unless others need the
        pages.
        """
        now = self._pauses.now()
        if self._store.tiers is None or now < self._next:
            return
        self._next = now + _EVERY_S
        for pause in self._pauses:
            if pause.pages and pause.branch.awaits_caller and pause.remaining_s(now) <= _AHEAD_S:
                self._fetch_for_pause(pause)

    def _fetch_for_pause(self, pause: PausedBranch) -> None:
        """Locks the part of a program's prefix that is on the device, and fetches the rest. Does
        nothing if pages are short.
        """
        store = self._store
        tiers = self._store.tiers
        tree = self._store.tree
        assert tiers is not None
        if store.available - pause.pages < store.pool.total // _SPARE:
            return
        match = tree.match_prefix(*pause.space.tree_key(pause.tokens))
        locked = tree.locked_pages
        pause.lock, before = tree.lock_node(match.node), pause.lock
        before.unlock_prefix()
        pause.pages = max(pause.pages - (tree.locked_pages - locked), 0)
        if pause.pages:
            tiers.fetch_after_match(pause.tokens, match, pause.space, self._pauses.token_s, None)
