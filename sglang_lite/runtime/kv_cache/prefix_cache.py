"""KV cache: the page pool, the radix tree and the slot table, and the moves of pages between them.

A page has exactly one owner at any time: the pool (free or in quarantine), the tree, a running
request (the pages of its slot from `owned_from` on), or a promise of the source of pages. A running
request reads pages of the tree under its lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from sglang_lite.protocol.trace import MissReason
from sglang_lite.runtime.kv_cache.cache_miss import Miss, find_miss
from sglang_lite.runtime.kv_cache.companions import Companion
from sglang_lite.runtime.kv_cache.page_copies import NO_COPIES, PageCopy, token_slots_to_copy
from sglang_lite.runtime.kv_cache.page_source import PageSource
from sglang_lite.runtime.kv_cache.pages import Ints, PagePool
from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace
from sglang_lite.runtime.kv_cache.radix import Match, PrefixLock, Priority, RadixTree, Tail
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.kv_cache.state_pages import StatePages
from sglang_lite.runtime.kv_cache.tree_changes import TreeChanges
from sglang_lite.runtime.kv_cache.window_pages import WindowPages


class SlotHandle:
    """Resources of a running request: a slot, a lock on its cached prefix, and the pages it owns.

    Attributes:
        slot: row of the slot table.
        lock: lock on the pages that it reads from the tree.
        owned_from: index of its first own page; earlier pages belong to the tree.
        space: part of the cache that holds its prefix.
    """

    __slots__ = ("lock", "owned_from", "slot", "space")

    def __init__(self, slot: int, lock: PrefixLock, owned_from: int, space: PrefixSpace) -> None:
        self.slot = slot
        self.lock = lock
        self.owned_from = owned_from
        self.space = space


class PrefixCache:
    """Page pool, radix tree and slot table of one engine.

    Args:
        pages: number of pages in the pool.
        page_size: tokens in a page.
        slots: maximum number of running requests.
        longest: longest sequence in tokens.
        reuse: whether to keep computed prefixes in the tree.
        priority: key function of the eviction order, lowest first.
        reveal_others: whether reasons for cache misses may reveal other prompts and namespaces.
        windows: pages of the layers with a window; None if these layers have no separate pages.
        states: states of recurrent layers; None if the model has none.
        changes: records which prefixes the tree gains and loses, or None.

    Attributes:
        windows, states: the arguments of these names.
        companions: other memory that belongs to pages: `windows` and `states`, if given.
        pending_copies: copies to make before the next step.
        source: source of pages that the device lacks.
    """

    def __init__(
        self,
        pages: int,
        page_size: int,
        slots: int,
        longest: int,
        *,
        reuse: bool,
        priority: Priority,
        reveal_others: bool = True,
        windows: WindowPages | None = None,
        states: StatePages | None = None,
        changes: TreeChanges | None = None,
    ) -> None:
        self.page_size = page_size
        self.pool = PagePool(pages)
        self.tree = RadixTree(page_size, priority, changes)
        self.table = SlotTable(slots, longest, page_size)
        self.reuses = reuse
        self._reveal_others = reveal_others
        self.pending_copies: list[PageCopy] = []
        self.source = PageSource()
        self.windows = windows
        self.states = states
        self.companions: tuple[Companion, ...] = tuple(
            each for each in (windows, states) if each is not None
        )
        self.step = 0  # number of the last step that was launched

    @property
    def _pools(self) -> list[PagePool]:
        """Pools that must each have a free page for a new page of the cache."""
        others = (each.pool for each in self.companions)
        return [self.pool, *(pool for pool in others if pool is not None)]

    @property
    def available(self) -> int:
        """Number of pages that could be allocated now, by eviction if needed."""
        return self.pool.free + self.tree.evictable

    def match_usable(self, tokens: Ints, space: PrefixSpace) -> Match:
        """Finds the longest cached prefix that a request can use. At least one token remains to be
        computed, because its logits are needed.
        """
        end = len(tokens) - 1 if self.reuses else 0
        while True:  # one companion may shorten the match to where another one can't use it
            match = self.tree.match_prefix(
                *space.tree_key(tokens[:end]),
                None if self.states is None else self.states.count_covered,
            )
            cached = match.count_cached(self.page_size)
            usable = cached
            for each in self.companions:
                usable = min(usable, each.count_usable_tokens(match))
            end = space.count_trusted_tokens(usable)
            if end == cached:
                return match

    def allocate_slot_for(self, tokens: Ints, match: Match, space: PrefixSpace) -> SlotHandle:
        """Allocates a slot for a request, and enters the tokens and cached pages into the slot
        table. For a prefix that ends inside a page, also schedules a copy of that page's cached
        tokens if a page is available.
        """
        lock = self.tree.lock_node(match.node)
        if self.source.has_pages:
            self.source.save_reused(match.node)
        slot = self.table.allocate_slot()
        table = self.table
        count = len(match.pages)
        table.tokens[slot, : len(tokens)] = tokens
        table.pages[slot, :count] = match.pages
        table.page_count[slot] = count
        table.length[slot] = table.known[slot] = len(tokens)
        table.computed[slot] = count * self.page_size
        handle = SlotHandle(slot, lock, count, space)
        for each in self.companions:
            each.begin_reading(slot, match)
        if match.tail is not None:
            self._schedule_copy(handle, match.tail)
        if self.states is not None:
            ids, namespace = space.tree_key(tokens[:-1])
            in_tree = self.tree.cached_length(ids, namespace)
            self.states.recomputed += max(in_tree - match.count_cached(self.page_size), 0)
        return handle

    def explain_miss(
        self, prompt: Ints, usable: int, match: Match, handle: SlotHandle, *, paused: bool = False
    ) -> Miss | None:
        """Returns the reason why tokens of a newly admitted request must be computed, or None if
        all usable ones were cached.

        Args:
            prompt: token ids of the prompt.
            usable: number of tokens that could have been cached.
            match: cached prefix found at admission.
            handle: resources of the request.
            paused: whether the request's program was paused and gave up pages meanwhile.
        """
        cached = int(self.table.computed[handle.slot])
        if cached >= usable:
            return None
        if not self.reuses:
            return Miss("disabled", 0, _NO_TOKENS, _NO_TOKENS, _NO_TOKENS)
        found = find_miss(
            self.tree,
            prompt,
            usable,
            match,
            cached,
            handle.space,
            paused=paused,
            reveal_others=self._reveal_others,
        )
        ids = handle.space.tree_ids(prompt[:usable])
        if (where := self.source.find_next_page(match, ids)) is not None:
            return replace(found, reason=where)
        in_tree = self.tree.cached_length(ids, handle.space.namespace) if self.companions else 0
        if in_tree > len(match.pages) * self.page_size:  # without companion memory
            lost: MissReason = "no_state" if self.windows is None else "evicted"
            return replace(found, reason="paused" if paused else lost)
        return found

    def adopt_cached_pages(self, handle: SlotHandle) -> None:
        """Makes a slot use the tree's pages if these hold more of the slot's tokens than it has
        computed. Called after the slot's tokens have changed.
        """
        node = handle.lock.node
        # nothing in the tree continues from here
        if handle.owned_from and node is not None and not node.children:
            return
        slot = handle.slot
        table = self.table
        match = self.match_usable(table.tokens[slot, : table.known[slot]], handle.space)
        count = len(match.pages)
        if count * self.page_size <= table.computed[slot]:
            return
        lock = self.tree.lock_node(match.node)
        self._release_pages(handle)
        handle.lock.unlock_prefix()
        handle.lock = lock
        handle.owned_from = count
        table.pages[slot, :count] = match.pages
        for each in self.companions:
            each.begin_reading(slot, match)
        table.page_count[slot] = count
        table.computed[slot] = count * self.page_size
        if match.tail is not None:
            self._schedule_copy(handle, match.tail)

    def _schedule_copy(self, handle: SlotHandle, tail: Tail) -> None:
        """Schedules a copy of the page in which a slot's cached prefix ends. Does nothing if no
        page is available for the copy.
        """
        slot = handle.slot
        table = self.table
        source = self.tree.lock_node(tail.node)
        for each in self.companions:
            each.begin_copying(tail.page)
        page = self.allocate(1)
        if page is None:
            source.unlock_prefix()
            for each in self.companions:
                each.end_copying(tail.page, self.step)
            return
        table.pages[slot, table.page_count[slot]] = page[0]
        table.page_count[slot] += 1
        table.computed[slot] += tail.count
        self.pending_copies.append(PageCopy(slot, source, tail.page, int(page[0]), tail.count))

    def pop_pending_copies(self, slot: int | None = None) -> list[PageCopy]:
        """Removes and returns pending copies, and unlocks the pages that they read. Without `slot`,
        returns all copies, which the caller performs. With `slot`, returns only the copies of that
        slot, which the caller drops: their tokens will be computed instead.
        """
        if not self.pending_copies:
            return []
        taken = [copy for copy in self.pending_copies if slot in (None, copy.slot)]
        self.pending_copies = [
            copy for copy in self.pending_copies if slot not in (None, copy.slot)
        ]
        for copy in taken:
            copy.source.unlock_prefix()
            for each in self.companions:
                each.end_copying(copy.from_page, self.step)
            if slot is not None:
                self.table.computed[slot] -= copy.count
        return taken

    def reserve_pages(self, slot: int, end: int) -> bool:
        """Ensures that positions before `end` of a slot have pages. Returns False if not enough
        pages are available.
        """
        page_count = int(self.table.page_count[slot])
        needed = -(-end // self.page_size)
        if needed <= page_count:
            return True
        pages = self.allocate(needed - page_count)
        if pages is None:
            return False
        self.table.pages[slot, page_count:needed] = pages
        self.table.page_count[slot] = needed
        return True

    def reserve_free_pages(self, slot: int, end: int) -> int:
        """Allocates free pages for a slot's positions before `end`, without evicting anything.
        Returns how many of these positions have pages.
        """
        page_count = int(self.table.page_count[slot])
        size = self.page_size
        if end <= page_count * size:  # the usual case
            return end
        free = min(pool.free for pool in self._pools)
        count = min(-(-end // size) - page_count, free)
        if count > 0 and (pages := self.allocate(count)) is not None:
            self.table.pages[slot, page_count : page_count + count] = pages
            self.table.page_count[slot] += count
        return min(end, int(self.table.page_count[slot]) * size)

    def free_pages_from(self, slot: int, end: int) -> None:
        """Frees a slot's pages for positions from `end` on. No running step may read them."""
        page_count = int(self.table.page_count[slot])
        needed = -(-end // self.page_size)
        if needed < page_count:
            self._quarantine_pages(
                self.table.pages[slot, needed:page_count], self.pool.settled_step
            )
            self.complete_steps(self.pool.settled_step)
            self.table.page_count[slot] = needed

    def will_have_pages(self, slot: int, end: int) -> bool:
        """Returns whether a slot's positions before `end` can have pages once the running steps
        have completed and their pages become free.
        """
        needed = -(-end // self.page_size) - int(self.table.page_count[slot])
        soon = all(needed <= pool.free + pool.quarantined for pool in self._pools)
        return soon and any(pool.quarantined for pool in self._pools)

    def allocate(self, count: int) -> Ints | None:
        """Allocates `count` pages, evicting from the tree if needed. Returns None if not enough
        pages are available.
        """
        if count > self.pool.free:
            # pages evicted earlier become free a step later
            short = count - self.pool.free - self.pool.quarantined
            if short > 0:
                # Evicts some more than needed, so a full pool does not search for leaves at every
                # step.
                spare = min(self.pool.total // 64, self.tree.evictable)
                self.evict_pages(max(short, spare))
            self.pool.settle_quarantine()
        if count > self.pool.free or not all(each.make_room(count) for each in self.companions):
            return None
        pages = self.pool.allocate(count)
        for each in self.companions:
            each.attach(pages)
        return pages

    def complete_steps(self, step: int) -> None:
        """Records that all steps up to `step` have completed, so pages they may have read can be
        reused.
        """
        self.pool.settle_quarantine(step)
        for each in self.companions:
            each.settle_steps(step)

    def limit_chunk(self, tokens: int) -> int:
        """Returns how many of the next prompt tokens a step can compute."""
        return min((each.limit_chunk(tokens) for each in self.companions), default=tokens)

    # ------------------------------------------------------------------------------------- windows

    def count_window_pages(self, pages: int) -> int:
        """Returns how many window pages a request with `pages` pages needs."""
        return 0 if self.windows is None else min(pages, self.windows.kept)

    def spare_window_pages(self, pages: Ints) -> int:
        """Returns how many window pages remain once a step and all running requests have those that
        they need; 0 if there are no window pages.

        Args:
            pages: int32 [R], number of pages that each running request is expected to need.
        """
        windows = self.windows
        if windows is None:
            return 0
        return windows.pool.total - windows.chunk - int(np.minimum(pages, windows.kept).sum())

    def slots_lacking_window(self, slots: Ints) -> list[int]:
        """Returns the indices of the slots that need window pages which they have released. This
        happens when a sequence becomes shorter, so its window moves back.
        """
        if self.windows is None:
            return []
        found: list[int] = self.windows.slots_lacking_pages(
            slots, self.table.computed[slots]
        ).tolist()
        return found

    def window_slots_to_copy(self, copies: Sequence[PageCopy]) -> Ints:
        """Returns the token slots to copy in the layers with a window, int32 [2, tokens]; empty if
        there are no window pages.
        """
        if self.windows is None:
            return NO_COPIES
        return token_slots_to_copy(copies, self.page_size, self.windows.of)

    def release_behind_windows(
        self, slots: Ints, lengths: Ints, handle_of: Callable[[int], SlotHandle]
    ) -> None:
        """Releases the pages that the windows of these slots have moved past.

        Args:
            slots: int32 [R], the slots.
            lengths: int32 [R], number of computed tokens of each slot.
            handle_of: returns the resources of the request at an index.
        """
        if self.windows is None:
            return
        for row in self.windows.slots_past_window(slots, lengths).tolist():
            handle = handle_of(row)
            self.windows.release_behind_window(
                self.table, handle.slot, handle.owned_from, self.step
            )

    # -------------------------------------------------------------------------------------- states

    def slots_lacking_state(self, slots: Ints) -> list[int]:
        """Returns the indices of the slots whose state doesn't cover exactly the computed tokens.
        This happens when computed tokens were taken back, or when a copy of cached tokens was
        dropped.
        """
        if self.states is None:
            return []
        found: list[int] = np.flatnonzero(
            self.states.ends[slots] != self.table.computed[slots]
        ).tolist()
        return found

    def return_to_state(self, handle: SlotHandle) -> bool:
        """Makes a request recompute the tokens after its last state. Returns False if that would
        change pages of the tree, because no state covers all of them.
        """
        assert self.states is not None
        return self.states.rewind(self.table, handle.slot, handle.owned_from * self.page_size)

    def want_states(self, handle: SlotHandle, shared: Iterable[int], *, prompt: int) -> None:
        """Chooses the positions in a request's text at which states are kept, if the model has
        states: those from which other texts are expected to continue.

        Args:
            handle: resources of the request.
            shared: lengths of the prefixes that the request shares with waiting requests.
            prompt: length of its prompt.
        """
        if self.states is None or not self.reuses:
            return
        whole = (prompt - 1) // self.page_size * self.page_size
        ids, namespace = handle.space.tree_key(self.table.tokens[handle.slot, :prompt])
        self.states.want_states(
            handle.slot, {whole, self.tree.cached_length(ids, namespace), *shared}
        )

    def keep_state(self, handle: SlotHandle) -> None:
        """Keeps the state after a request's computed tokens if all of these are in the tree."""
        if self.states is not None and self.reuses:
            self.states.keep_current(
                handle.slot, self.table.pages[handle.slot, : handle.owned_from]
            )
            self._save_kept_states(handle)

    def _save_kept_states(self, handle: SlotHandle) -> None:
        """Lets the source save the states that are kept for a request's prefix, if any."""
        if self.states is not None and self.source.has_pages and handle.lock.node is not None:
            self.source.save_kept_states(handle.lock.node)

    # ------------------------------------------------------------- between pool, tree and requests

    def collect_finished_copies(self) -> int:
        """Adds pages that have arrived from the source to the tree. Returns the number of completed
        copies, in either direction.
        """
        completed = self.source.add_arrived_pages()
        self.pool.settle_quarantine(copy=completed)
        return completed

    def publish_pages(self, handle: SlotHandle, *, all_but_last: bool = False) -> None:
        """Moves every fully computed page to the tree, for other requests to use.

        The request continues to read these pages. If the tree already had a page, the request reads
        that one and frees its own.

        Args:
            handle: resources of the request.
            all_but_last: whether to keep the last token in a page that the request owns, so it can
                be computed again.
        """
        if not self.reuses:
            return
        slot = handle.slot
        full = (
            int(min(self.table.computed[slot], self.table.known[slot] - all_but_last))
            // self.page_size
        )
        if full <= handle.owned_from:
            return
        tokens = self.table.tokens[slot, : full * self.page_size]
        pages = self.table.pages[slot, :full]
        own = handle.owned_from * self.page_size
        space = handle.space
        # Adds the pages directly after the locked ones. The sequence is followed from the root only
        # if the tree may already have some of these pages.
        if not handle.lock.extend_with(
            space.tree_ids(tokens[own:], own), pages[handle.owned_from :]
        ):
            done = self.tree.insert_sequence(space.tree_ids(tokens), pages, space.namespace)
            for each in self.companions:
                each.replace_own_pages(slot, pages, done.pages)
            pages[:] = done.pages
            self._quarantine_pages(done.duplicates, self.step)
            lock = self.tree.lock_node(done.node)
            handle.lock.unlock_prefix()
            handle.lock = lock
        handle.owned_from = full
        if self.source.has_pages and handle.lock.node is not None:
            self.source.save_published(handle.lock.node)

    def release_request(self, handle: SlotHandle) -> None:
        """Releases all resources of a request. Its computed tokens stay in the tree."""
        self.pop_pending_copies(handle.slot)
        self.publish_pages(handle)
        self._release_pages(handle)
        self._save_kept_states(handle)
        handle.lock.unlock_prefix()
        self.table.release_slot(handle.slot)

    def _release_pages(self, handle: SlotHandle) -> None:
        """Frees the pages that a request owns, and records that it no longer reads the tree's
        pages.
        """
        slot = handle.slot
        owned_from = handle.owned_from
        pages = self.table.pages[slot, : self.table.page_count[slot]]
        for each in self.companions:
            each.end_reading(slot, pages[:owned_from], self.step)
        self._quarantine_pages(pages[owned_from:], self.step)

    def _quarantine_pages(self, pages: Ints, step: int, copy: int = 0) -> None:
        """Puts pages in quarantine. They become free once steps up to `step` and copies up to
        `copy`, which may still use them, have completed.
        """
        for each in self.companions:
            each.detach(pages, step)
        self.pool.quarantine_pages(pages, step, copy)

    def flush_prefixes(self, *, keep: bool = False) -> int:
        """Evicts every prefix that no request is using. Returns the number of pages freed.

        Args:
            keep: whether the source keeps the prefixes, if it has room. Otherwise, the source also
                forgets its own pages.
        """
        self.source.drop_pages(keep=keep)
        evicted = self.tree.evict_leaves(self.tree.pages, self.source.save_node if keep else None)
        self._quarantine_pages(evicted, self.step, self.source.launched_copies)
        self.source.start_copies()
        self.complete_steps(self.pool.settled_step)
        return len(evicted)

    def evict_pages(self, pages: int) -> int:
        """Evicts prefixes that no request is using, until `pages` pages or more are evicted or no
        prefix is left. Returns the number of pages freed. The pages become available when the steps
        and copies that may use them have completed.
        """
        evicted = self.tree.evict_leaves(pages, self.source.save_evicted)
        self._quarantine_pages(evicted, self.step, self.source.launched_copies)
        return len(evicted)


_NO_TOKENS: Ints = np.empty(0, dtype=np.int32)
