"""Fetches of cached pages that the device lacks, from a source such as the host's memory: for
waiting requests, and for paused programs shortly before they return.
"""

from __future__ import annotations

from typing import Final

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.kv_cache.radix import Match
from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.scheduler.pauses import PausedBranch, Pauses
from sglang_lite.runtime.scheduler.queues import Queues
from sglang_lite.runtime.scheduler.retraction import request_slots

# a program's pages are fetched this long before its expected return; longer than copies take
_AHEAD_S: Final = 0.25
_EVERY_S: Final = 0.02  # between two looks at the pauses
_SPARE: Final = 8  # one in this many pages stays available


class PageFetches:
    """Fetches pages from the store's source.

    Args:
        store: pages, their source and the radix tree.
        queues: requests that have not ended.
        pauses: paused branches of programs.
    """

    def __init__(self, store: PrefixCache, queues: Queues, pauses: Pauses) -> None:
        self._store = store
        self._queues = queues
        self._pauses = pauses
        self._next = 0.0  # time of the next look at the pauses
        self._lacking = 0  # pages that the last plan lacked for fetches
        self._completed = 0  # copies that had completed at the last plan

    @property
    def may_change_plan(self) -> bool:
        """Whether planning may have an effect even though there are no requests."""
        return self._store.source.has_pages

    @property
    def are_pending(self) -> bool:
        """Whether pages are promised, or copies in either direction had not completed at the last
        plan.
        """
        source = self._store.source
        return source.has_pages and source.has_pending_pages(self._completed)

    def collect_arrived(self) -> None:
        """Adds pages that have arrived on the device to the tree."""
        if self._store.source.has_pages:
            self._completed = self._store.collect_finished_copies()

    def read_ahead_for(self, request: Request) -> None:
        """Starts to bring cached pages of a request's prompt nearer to the device, because the
        request may have to wait for its turn.
        """
        if self._store.source.has_pages:
            request.cache.promise = self._store.source.read_ahead(
                request.tokens, request.space, self._pauses.token_s
            )

    def fetch_missing(
        self, request: Request, reusable: Ints, match: Match, needed: int
    ) -> tuple[Match, bool]:
        """Fetches the pages of a request's prompt that the device lacks, if that is faster than
        computing them.

        Args:
            request: a request that could be admitted.
            reusable: int32, tokens of its prompt that may be cached.
            match: their pages that are on the device.
            needed: pages to be allocated for it.

        Returns:
            The match, including pages that have arrived immediately, and whether the request has to
            wait.
        """
        store = self._store
        while True:
            if (
                not store.source.has_pages
                or len(reusable) <= len(match.pages) * store.page_size + 1
            ):
                return match, False
            promise = store.source.fetch_after_match(
                reusable, match, request.space, self._pauses.token_s, request.cache.promise
            )
            if promise == "later":
                self._lacking += needed
                return match, True
            if promise is None:
                return match, False
            request.cache.record_promise(promise, store.page_size)
            if not promise.done:
                return match, True
            match = store.match_usable(reusable, request.space)

    def count_extra_pages(self) -> int:
        """Returns how many pages programs may use in addition to the device's."""
        source = self._store.source
        return source.count_extra_pages(self._pauses.token_s) if source.has_pages else 0

    def evict_ahead(self, tokens: int) -> None:
        """Evicts pages one step in advance, because evicted pages are free only one step later.
        Makes room for fetches and for up to `tokens` prompt tokens. Does nothing without a source,
        because pages evicted early would have to be computed again.
        """
        store = self._store
        lacking = self._lacking
        self._lacking = 0
        if not store.source.has_pages:
            return
        table = store.table
        slots = request_slots(self._queues.prefilling)
        prompts = int((-(-table.length[slots] // store.page_size) - table.page_count[slots]).sum())
        short = min(prompts, max(tokens, 0) // store.page_size) + lacking
        short -= store.pool.free + store.pool.quarantined
        if short > 0 and store.tree.evictable:
            store.evict_pages(min(short, store.tree.evictable))

    def fetch_for_pauses(self) -> None:
        """Fetches pages given up by paused programs that are expected soon, unless others need the
        pages.
        """
        if not self._store.source.has_pages or (now := self._pauses.now()) < self._next:
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
        tree = self._store.tree
        if store.available - pause.pages < store.pool.total // _SPARE:
            return
        match = tree.match_prefix(*pause.space.tree_key(pause.tokens))
        locked = tree.locked_pages
        pause.lock, before = tree.lock_node(match.node), pause.lock
        before.unlock_prefix()
        pause.pages = max(pause.pages - (tree.locked_pages - locked), 0)
        if pause.pages:
            token_s = self._pauses.token_s
            store.source.fetch_after_match(pause.tokens, match, pause.space, token_s, None)
