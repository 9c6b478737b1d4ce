"""Tiers of the KV cache below the device, such as host memory and files. Decides which pages are
copied to them, and which are fetched back.

Pages below the device are identified by name (page_names.py), so the radix tree only covers the
device. A fetched page belongs to its `Fetch` until it is in the tree. A page that is being copied
down stays in place; if it is evicted meanwhile, it is in quarantine until the copy has ended.
Copies run in order, so a later copy may use the same slot of the host immediately. Threads that
read or write files pin the slots, and start when earlier copies have completed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import takewhile
from typing import TYPE_CHECKING, Literal

import numpy as np

from sglang_lite.runtime.kv_cache.disk_tier import RUN_TOKENS, DiskTier
from sglang_lite.runtime.kv_cache.fetches import DiskRead, Fetch, MissingPages, WantedPages
from sglang_lite.runtime.kv_cache.file_writes import FileWrites
from sglang_lite.runtime.kv_cache.host_tier import HostTier
from sglang_lite.runtime.kv_cache.page_names import PageNames, name_state_file
from sglang_lite.runtime.kv_cache.page_source import NextPage, PageSource, PromisedPages
from sglang_lite.runtime.kv_cache.page_sums import Rows
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace
from sglang_lite.runtime.kv_cache.radix import Match, Node, PrefixLock
from sglang_lite.runtime.kv_cache.state_read import StateRead
from sglang_lite.runtime.kv_cache.state_tier import StateTier

if TYPE_CHECKING:
    from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache

_MIN_FETCHED = 16  # tokens; fewer are computed
# one sequence in this many is fetched although computing seems faster, in case that has changed
_AGAIN = 64
_PART_FILES = 8  # files of a sequence read and then fetched together, while the next part is read
_MAX_READING = 64  # maximum number of parts read before their requests are admitted
# with the policy "timeout": seconds to wait for files, and additional seconds per token
_PATIENCE_S = 2.0
_TOKEN_PATIENCE_S = 1e-4
_CLOSE_S = 0.001  # pause while copies and writes end
DEADLINE_S = 10.0  # for reading files; after it, their store is disabled


class Tiers(PageSource):
    """Moves pages between the device and the tiers below.

    Args:
        store: cache of the device.
        host: tier in the host's memory.
        names: names of pages.
        policy: when pages are copied to the host: "write_through", when they are computed;
            "write_through_selective", when they are used again; "write_back", when they are
            evicted.
        disk: tier below the host, or None.
        prefetch_policy: how long requests wait for files: "best_effort", "wait_complete" or
            "timeout".
        states: tier of states, which move with the pages; None for models without states.

    Attributes:
        host, names, disk, states: the arguments of these names.
        fetching: pages being copied to the device.
        fetched_pages, read_pages: numbers of pages fetched from the host, and from the disk, so
            far.
    """

    has_pages = True

    def __init__(
        self,
        store: PrefixCache,
        host: HostTier,
        names: PageNames,
        policy: str,
        disk: DiskTier | None = None,
        prefetch_policy: str = "timeout",
        states: StateTier | None = None,
    ) -> None:
        self._store = store
        self.host = host
        self.names = names
        self._policy = policy
        self.disk = disk
        self._prefetch_policy = prefetch_policy
        self.states = states
        self.fetching: list[Fetch] = []
        self.fetched_pages = self.read_pages = 0
        self._run = -(-RUN_TOKENS // store.page_size)  # pages in a file
        self._reading: dict[bytes, DiskRead] = {}  # by the first page's name
        self._reading_states: dict[bytes, StateRead] = {}  # likewise
        self._last_read = 0.0  # when a read ended, as perf_counter()
        self._writes = FileWrites(host, None if states is None else states.host)
        self._file_page_s = 0.0  # seconds to read a page of a file, as measured; 0 if unknown
        self._computed = 0  # sequences that seemed faster to compute than to fetch

    @property
    def has_files(self) -> bool:
        """Whether pages are also written to files."""
        return self.disk is not None

    @property
    def launched_copies(self) -> int:
        """Number of copies to and from the host that have been launched so far."""
        return self.host.memory.launched

    @property
    def _reads(self) -> list[DiskRead | StateRead]:
        return [*self._reading.values(), *self._reading_states.values()]

    def has_pending_pages(self, completed: int) -> bool:
        """Returns whether pages are being fetched or read, or copies are still running. `completed`
        is the number of copies that have completed.
        """
        reading = any(not each.done for each in self._reads)
        if self.states is not None and self.states.copies_are_running:
            return True
        return bool(self.fetching) or reading or completed < self.host.memory.launched

    def check_invariants(self) -> None:
        """Raises AssertionError if the host's slots, or states on their way, are miscounted."""
        self.host.check_slots()
        if self.states is not None:
            self.states.check_invariants(
                [fetch.state for fetch in self.fetching if fetch.state is not None]
            )

    def stats(self) -> dict[str, int]:
        """Returns counts for `Engine.stats`."""
        size = self._store.page_size
        return {
            "host_cached_tokens": len(self.host) * size,
            "host_total_tokens": len(self.host.memory.rows) * size,
            "host_tokens_fetched": self.fetched_pages * size,
            "disk_tokens_read": self.read_pages * size,
            **({} if self.states is None else self.states.stats()),
        }

    def count_extra_pages(self, token_s: float) -> int:
        """Returns how many pages programs may use in addition to the device's, because the host can
        hold them. Returns 0 if fetching a page takes longer than computing it.

        Args:
            token_s: seconds to compute a token; 0 if unknown.
        """
        if self._is_fetching_slower(self.host.memory.page_s, token_s):
            return 0
        return max(
            len(self.host.memory.rows) - (self._policy != "write_back") * self._store.pool.total, 0
        )

    def _is_fetching_slower(self, page_s: float, token_s: float) -> bool:
        """Returns whether measurements say that fetching a page takes longer than computing it."""
        return bool(token_s) and page_s > token_s * self._store.page_size

    def _should_compute(self, fetch_s: float, tokens: int, token_s: float) -> bool:
        """Returns whether to compute tokens because fetching them takes longer. Occasionally
        returns False anyway, to measure again.

        Args:
            fetch_s: seconds that the fetch takes; 0 if unknown.
            tokens: number of tokens.
            token_s: seconds to compute a token; 0 if unknown.
        """
        if not token_s or fetch_s <= token_s * tokens:
            return False
        self._computed += 1
        return self._computed % _AGAIN > 0

    def find_next_page(self, match: Match, tokens: Ints) -> NextPage | None:
        """Returns the tier that has the page after a match or, for models with states, a later
        state: "on_host", or "on_disk" if a file with the page is known. Returns None if neither has
        it.
        """
        size = self._store.page_size
        at = len(match.pages)
        if self.states is not None:
            rest = tokens[at * size :]
            names = list(self.names.names_after(self.names.last_name(match.node), rest))
            return "on_host" if self.states.find_last(names) else None
        end = (at // self._run + 1) * self._run  # end of the file with this page
        behind = list(
            self.names.names_after(self.names.last_name(match.node), tokens[at * size : end * size])
        )
        if behind and behind[0] in self.host:
            return "on_host"
        known = self.disk is not None and len(behind) == end - at and behind[-1] in self.disk.known
        return "on_disk" if known else None

    # ----------------------------------------------------------------------------------------- down

    def save_published(self, node: Node) -> None:
        """Saves a node whose pages have been added to the tree, if the policy is "write_through"."""
        if self._policy == "write_through":
            self.save_node(node)
        self.save_kept_states(node)

    def save_kept_states(self, node: Node) -> None:
        """Saves the states of a prefix that have been kept since the last call, from the root to
        `node`, if the policy is "write_through". With "write_back", they are saved when they are
        dropped.
        """
        if self.states is None or self._policy == "write_through_selective":
            return
        path: list[Node] = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        for each in reversed(path):  # the last one counts as the most recently used
            if self._policy == "write_through":
                self._save_states(self.states, each, new=True)
            else:
                self.states.name_states(self.names, each)

    def save_reused(self, node: Node) -> None:
        """Saves the nodes of a prefix that a request reuses, from the root to `node`. Does nothing
        unless the policy is "write_through_selective".
        """
        if self._policy == "write_through_selective":
            while node.parent is not None:
                self.save_node(node)
                node = node.parent

    def save_evicted(self, node: Node) -> None:
        """Saves a node whose pages are being evicted from the device, if the policy is
        "write_back".
        """
        if self._policy == "write_back":
            self.save_node(node)

    def save_node(self, node: Node) -> None:
        """Copies the pages of a node to the tiers below, as space permits."""
        self.host.save_pages(self.names.names_of_node(node), node.pages)
        if self.states is not None:
            self._save_states(self.states, node)
        if self.disk is not None and not self.disk.off:
            self._save_files(self.disk, node)

    def _save_states(self, states: StateTier, node: Node, *, new: bool = False) -> None:
        """Copies the kept states of a node's pages to the host, and queues their files to be
        written. If `new` is set, leaves out states that have already been copied.
        """
        saved = states.save_states(self.names, node, new=new)
        if not saved or self.disk is None or self.disk.off:
            return
        names = self.names.names_of_prefix(node)
        for index in saved:
            end = len(names) - len(node.pages) + index + 1
            first = end - end % self._run
            page = names[end - 1]
            if name_state_file(page) not in self.disk.known and not self._writes.is_full:
                self.host.save_pages(names[first:end], _pages_from(node, first)[: end - first])
                self._writes.queue_state_file(names[first:end], page)
        self._advance_file_work()

    def _save_files(self, disk: DiskTier, node: Node) -> None:
        """Queues files to be written: those that end with a page of this node. Their earlier pages
        may be in the nodes above it.
        """
        start = 0
        above = node.parent
        while above is not None:
            start = start + len(above.pages)
            above = above.parent
        names = self.names.names_of_node(node)
        pages = node.pages
        first = start
        for end in range(
            (start // self._run + 1) * self._run, start + len(node.pages) + 1, self._run
        ):
            while end - self._run < first:
                assert node.parent is not None
                node = node.parent
                names = [*self.names.names_of_node(node), *names]
                pages = np.concatenate((node.pages, pages))
                first -= len(node.pages)
            part = slice(end - self._run - first, end - first)
            if names[part][-1] not in disk.known and not self._writes.is_full:
                self.host.save_pages(names[part], pages[part])
                self._writes.queue_file(names[part])
        self._advance_file_work()

    # ------------------------------------------------------------------------------------------- up

    def fetch_after_match(
        self,
        tokens: Ints,
        match: Match,
        space: PrefixSpace,
        token_s: float,
        before: PromisedPages | None,
    ) -> PromisedPages | Literal["later"] | None:
        """Starts fetching the pages that follow a match from the host's memory, or reading them
        from files; see `PageSource.fetch_after_match`.
        """
        store = self._store
        size = self._store.page_size
        tokens = space.tree_ids(tokens)
        missing = self._list_missing_pages(tokens, match, space)
        wanted = self._choose_pages(missing, space)
        if self.disk is not None and not self.disk.off and not missing.were_read_by(before):
            before = self._start_lookup(missing, wanted, token_s)
            if before is not None and not before.done:
                return before
            wanted = self._choose_pages(missing, space)
        gained = wanted.end - missing.usable
        copies_s = len(wanted.names) * self.host.memory.page_s
        if self.states is not None:
            copies_s += self.states.host.memory.page_s
        if gained < _MIN_FETCHED or self._should_compute(copies_s, gained, token_s):
            return None
        for other in self.fetching:
            if other.first == wanted.first:
                return other
        lock = store.tree.lock_node(missing.match.node)
        if len(wanted.names) > store.available + store.pool.quarantined:
            lock.unlock_prefix()
            return None
        pages = self._allocate_pages_for(wanted)
        if pages is None:
            lock.unlock_prefix()
            return "later"
        state = None
        if self.states is not None and wanted.state is not None:
            state = self.states.start_fetch(wanted.state, wanted.end // size)
            if state is None:
                store.pool.quarantine_pages(pages, store.step)
                lock.unlock_prefix()
                return None
        if len(pages):
            slots = self.host.touch_pages(wanted.names[: len(pages)])
            self.host.memory.copy_to_device(slots, pages)
        pages_before = missing.match.pages[: wanted.end // size]
        from_disk = min(before.read, len(pages)) if isinstance(before, DiskRead | StateRead) else 0
        fetch = Fetch(
            tokens[: (len(pages_before) + len(pages)) * size].copy(),
            space.namespace,
            lock,
            pages_before,
            pages,
            wanted.first,
            self.host.memory.launched,
            state,
            from_host=len(pages) - from_disk,
            from_files=from_disk,
        )
        self.fetching.append(fetch)
        self.fetched_pages += len(pages)
        self.add_arrived_pages()
        return fetch

    def _list_missing_pages(self, tokens: Ints, match: Match, space: PrefixSpace) -> MissingPages:
        """Returns the pages of a sequence that the device lacks after a match. `tokens` are the ids
        in the tree, int32.
        """
        size = self._store.page_size
        usable = len(match.pages) * size
        before: Sequence[bytes] = ()
        if self.states is not None:
            usable = self.states.count_usable_tokens(match)
            match = self._store.tree.match_prefix(tokens[:-1], space.namespace)
            before = self.names.names_of_prefix(match.node)
        rest = tokens[len(match.pages) * size : len(tokens) - 1]
        names = list(self.names.names_after(self.names.last_name(match.node), rest))
        return MissingPages(match, usable, names, before)

    def _choose_pages(self, missing: MissingPages, space: PrefixSpace) -> WantedPages:
        """Returns which of a sequence's missing pages to fetch from the host: all that the host has
        or, for models with states, those up to the last state that the host has.
        """
        size = self._store.page_size
        at = len(missing.match.pages)
        found = list(takewhile(self.host.__contains__, missing.names))
        if self.states is None:
            return WantedPages(found, (at + len(found)) * size)
        names = [*missing.before, *found]
        end = self.states.find_last(names)
        if not end or space.count_trusted_tokens(end * size) != end * size:
            return WantedPages([], 0)
        return WantedPages(found[: max(end - at, 0)], end * size, names[end - 1])

    def _allocate_pages_for(self, wanted: WantedPages) -> Ints | None:
        """Allocates pages of the device for the wanted pages of the host. This may evict pages to
        the host that replace some of the wanted ones there; then allocates only as many as can
        still be used. Returns None if there are none.
        """
        store = self._store
        # marks them as recently used, so pages evicted to the host now replace others first
        self.host.touch_pages(wanted.names)
        if self.states is not None and wanted.state is not None:
            self.states.host.touch_pages([wanted.state])
        pages = store.allocate(len(wanted.names))
        if pages is None:
            return None
        left = sum(1 for _ in takewhile(self.host.__contains__, wanted.names))
        if self.states is None:
            can_start = left > 0
        else:
            can_start = left == len(pages) and self.states.has_state(wanted.state)
        left = left if can_start else 0
        store.pool.quarantine_pages(pages[left:], store.step)
        return pages[:left] if can_start else None

    def read_ahead(
        self, tokens: Ints, space: PrefixSpace, token_s: float
    ) -> DiskRead | StateRead | None:
        """Starts to read a sequence's pages from files if neither the device nor the host has them;
        see `PageSource.read_ahead`.
        """
        if self.disk is None or self.disk.off or len(self._reads) >= _MAX_READING:
            return None
        match = self._store.match_usable(tokens, space)
        missing = self._list_missing_pages(space.tree_ids(tokens), match, space)
        return self._start_lookup(missing, self._choose_pages(missing, space), token_s)

    def _start_lookup(
        self, missing: MissingPages, wanted: WantedPages, token_s: float
    ) -> DiskRead | StateRead | None:
        """Starts looking for files with the pages of a sequence that neither the device nor the
        host has. Returns None if there are too few such pages, or computing is faster.

        Args:
            missing: pages that the device lacks.
            wanted: the missing pages that are to be fetched from the host.
            token_s: seconds to compute a token; 0 if unknown.
        """
        at = len(missing.match.pages)
        if self.states is None:
            return self._start_file_lookup(at, missing.names, len(wanted.names), token_s)
        return self._start_state_lookup(self.states, missing, wanted, token_s)

    def _start_state_lookup(
        self, states: StateTier, missing: MissingPages, wanted: WantedPages, token_s: float
    ) -> StateRead | None:
        """Does the work of `_start_lookup` for a model with states."""
        assert self.disk is not None
        size = self._store.page_size
        run = self._run
        names = [*missing.before, *missing.names]
        on_host = sum(1 for _ in takewhile(self.host.__contains__, missing.names))
        available = len(missing.match.pages) + on_host
        usable = max(missing.usable, wanted.end) // size
        least = usable + -(-_MIN_FETCHED // size)
        if len(names) < least or self._should_compute(self._file_page_s, size, token_s):
            return None
        name = names[min(available, len(names) - 1)]
        if name in self._reading_states:
            return self._reading_states[name]
        whole = available // run * run
        files = [names[end - 1] for end in range(whole + run, len(names) + 1, run)]
        found = self.disk.find_last_state(files, names, whole, run, least)
        patience_s = _max_file_wait_s(self._prefetch_policy, (len(names) - usable) * size)
        read = StateRead(self.host, states.host, run, names, available, usable, found, patience_s)
        read.done = not patience_s
        self._reading_states[name] = read
        self._advance_file_work()
        return read

    def _start_file_lookup(
        self, at: int, behind: Sequence[bytes], found: int, token_s: float
    ) -> DiskRead | None:
        """Starts looking for files with the pages that follow those found on the host. Returns None
        if there are too few such pages, or computing is faster.

        Args:
            at: number of the sequence's pages before those in `behind`.
            behind: names of the following pages of the sequence.
            found: number of these following pages that the host has.
            token_s: seconds to compute a token; 0 if unknown.
        """
        assert self.disk is not None
        first = at + found
        run = first // self._run
        ends = range((run + 1) * self._run, at + len(behind) + 1, self._run)
        size = self._store.page_size
        if (
            not ends
            or (ends[-1] - first) * size < _MIN_FETCHED
            or self._should_compute(self._file_page_s, size, token_s)
        ):
            return None
        name = behind[found]
        if name in self._reading:
            return self._reading[name]
        files = [behind[end - 1 - at] for end in ends]
        exist = self.disk.count_existing(files)
        patience_s = _max_file_wait_s(self._prefetch_policy, (ends[-1] - first) * size)
        for start in range(0, len(files), _PART_FILES):
            part = ends[start : start + _PART_FILES]
            begin = max(part[0] - self._run, first)
            names = behind[begin - at : part[-1] - at]
            skip = begin - (part[0] - self._run)
            read = DiskRead(
                names,
                files[start : start + _PART_FILES],
                skip,
                exist,
                start,
                begin - first,
                patience_s,
            )
            read.done = not patience_s
            self._reading.setdefault(names[0], read)
        read = self._reading[name]
        self._advance_file_work()
        return read

    def list_pending_pages(self) -> list[tuple[PrefixLock, Ints]]:
        """Returns the locks and pages of the fetches."""
        return [(fetch.lock, fetch.pages) for fetch in self.fetching]

    def add_arrived_pages(self) -> int:
        """Adds pages that have arrived on the device to the tree. Returns the number of completed
        copies, including those to the host.
        """
        self._advance_file_work()
        completed = self.host.memory.count_completed()
        states = 0 if self.states is None else self.states.settle_copies()
        store = self._store
        while self.fetching and self.fetching[0].has_arrived(completed, states):
            fetch = self.fetching.pop(0)
            done = store.tree.insert_sequence(
                fetch.tokens, np.concatenate((fetch.before, fetch.pages)), fetch.namespace
            )
            store.pool.quarantine_pages(done.duplicates, store.step)
            if self.states is not None and fetch.state is not None:
                self.states.adopt_fetched(fetch.state, done.pages)
            fetch.lock.unlock_prefix()
            fetch.done = True
        if self.states is not None:
            self.states.make_room()
        return completed

    def drop_pages(self, *, keep: bool = False) -> None:
        """Abandons all fetches, because the device's memory may be released. Also forgets the
        host's pages and abandons reads of files, unless `keep` is set. Files stay.
        """
        self.start_copies()
        for fetch in self.fetching:
            self._store.pool.quarantine_pages(fetch.pages, self._store.step, fetch.copy)
            if self.states is not None and fetch.state is not None:
                self.states.abandon_fetch(fetch.state)
            fetch.lock.unlock_prefix()
            fetch.done = True
        self.fetching.clear()
        if keep:
            return
        for read in self._reads:
            read.done = read.dropped = True
        self.host.forget_pages()
        if self.states is not None:
            self.states.forget_states()

    def start_copies(self) -> None:
        """Launches copies that were waiting for earlier ones."""
        self.host.memory.count_completed()
        if self.states is not None:
            self.states.settle_copies()

    def close(self) -> None:
        """Finishes pending file writes, and closes the disk tier and the host's memory. Stops
        waiting for the writes if the disk tier is turned off.
        """
        if self.disk is not None:
            while self._writes and not self.disk.off:
                self._advance_file_work()
                time.sleep(_CLOSE_S)
            self.disk.close()
        self.host.memory.close()
        if self.states is not None:
            self.states.host.memory.close()

    # ---------------------------------------------------------------------------------------- files

    def _advance_file_work(self) -> None:
        """Advances the reading and writing of files: starts what has become possible, and processes
        what has finished.
        """
        if self.disk is None:
            return
        completed = self.host.memory.count_completed()
        completed_states = 0 if self.states is None else self.states.settle_copies()
        self._writes.advance_writes(self.disk, completed, completed_states)
        for name, read in list(self._reading.items()):
            if self._advance_read(read, completed):
                self._end_read(read)
                del self._reading[name]
            else:
                self._limit_wait(self.disk, read)
        for name, state in list(self._reading_states.items()):
            if self._advance_state_read(state, completed, completed_states):
                self._end_read(state)
                del self._reading_states[name]
            else:
                self._limit_wait(self.disk, state)

    def _end_read(self, read: DiskRead | StateRead) -> None:
        read.done = True
        self._last_read = time.perf_counter()

    def _limit_wait(self, disk: DiskTier, read: DiskRead | StateRead) -> None:
        """Ends the wait of requests for a read that takes too long, and stops the disk tier if it
        has returned nothing for a long time.
        """
        now = time.perf_counter()
        waited_s = now - read.asked
        read.done = read.done or waited_s > read.patience_s
        if waited_s > DEADLINE_S:
            read.done = read.dropped = True  # a thread may still write its slots
        # A slow store stays in use as long as it returns files.
        if now - max(read.asked, self._last_read) > DEADLINE_S and not disk.off:
            disk.stop(f"a file was not read in {DEADLINE_S:g} seconds.")

    def _advance_state_read(self, read: StateRead, completed: int, completed_states: int) -> bool:
        """Does the work of `_advance_read` for a model with states."""
        assert self.disk is not None
        if not read.advance(self.disk, (completed, completed_states)):
            return False
        self.read_pages += read.read
        if read.page_s:
            self._average_file_time(read.page_s)
        return True

    def _average_file_time(self, page_s: float) -> None:
        self._file_page_s += (page_s - self._file_page_s) / 4 if self._file_page_s else page_s

    def _advance_read(self, read: DiskRead, completed: int) -> bool:
        """Performs the next stage of reading files, if the previous one has ended. Returns True
        after the last stage.
        """
        assert self.disk is not None
        if not read.found.done():
            return False
        exist = read.found.result() - read.earlier_files
        files = read.files[: max(exist, 0)]
        if not len(read.slots):
            read.slots = self.host.reserve_pinned_slots(max(len(files) * self._run - read.skip, 0))
            read.copy = self.host.memory.launched
        if not len(read.slots):
            return True
        if read.dropped and not read.filled:
            self.host.unpin_slots(read.slots)
            return True
        if not read.filled and read.copy <= completed:
            started = _start_file_reads(self.disk, self.host.memory.rows, self._run, files, read)
            read.filled = list(started)
            read.began = time.perf_counter()
        if not read.filled or not all(each.done() for each in read.filled):
            return False
        whole = sum(1 for _ in takewhile(Future.result, read.filled))
        filled = 0 if read.dropped else min(max(whole * self._run - read.skip, 0), len(read.slots))
        if filled and exist <= len(files):  # the last part
            self._average_file_time((time.perf_counter() - read.began) / (read.earlier + filled))
        self.host.name_reserved_slots(read.names[:filled], read.slots)
        read.read = filled
        self.read_pages += filled
        return True


def _pages_from(node: Node, first: int) -> Ints:
    """Returns the pages of the sequence that ends with a node, from its page `first` on, int32."""
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return np.concatenate([each.pages for each in reversed(path)])[first:]


def _max_file_wait_s(policy: str, tokens: int) -> float:
    """Returns how many seconds a request waits for tokens to be read from files."""
    if policy == "timeout":
        return _PATIENCE_S + _TOKEN_PATIENCE_S * tokens
    return DEADLINE_S if policy == "wait_complete" else 0.0


def _start_file_reads(
    disk: DiskTier, rows: Rows, run: int, files: Sequence[bytes], read: DiskRead
) -> Iterator[Future[bool]]:
    """Starts reading files, each with `run` pages, into the slots of `read`. Yields a future for
    each file that has slots.
    """
    for i, name in enumerate(files):
        start, end = (max(pages * run - read.skip, 0) for pages in (i, i + 1))
        if len(read.slots) > start:
            yield disk.start_read(name, rows, read.slots[start:end], 0 if i else read.skip)


_NONE: Ints = np.empty(0, dtype=np.int32)
