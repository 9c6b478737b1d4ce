"""Source of cached pages that the device lacks, such as the host's memory and files. The engine
waits for such pages instead of computing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sglang_lite.runtime.kv_cache.pages import Ints
    from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace
    from sglang_lite.runtime.kv_cache.radix import Match, Node, PrefixLock

NextPage = Literal["on_host", "on_disk"]


@dataclass(eq=False, slots=True, kw_only=True)
class PromisedPages:
    """Pages of a sequence that a source has promised.

    Attributes:
        done: whether requests no longer wait for the promise, because the pages are in the tree or
            nearer to the device, don't exist, or take too long. A request that waited is then
            matched with the tree again, and the source is asked again; it must not return the same
            promise.
        from_host, from_files: numbers of pages that the promise brings into the tree from the
            host's memory and from files.
    """

    done: bool = False
    from_host: int = 0
    from_files: int = 0


class PageSource:
    """Source of pages that the device lacks. This base class has no pages.

    All methods are called on the engine's thread, while launched steps may still run. For pages
    that it promises, a source allocates pages of the device, and locks the prefix before them. Once
    their contents have arrived, it adds the allocated pages to the tree; if the contents are lost,
    it puts these pages in quarantine.

    Attributes:
        has_pages: whether the source can have pages. If not, the scheduler never asks for any.
    """

    has_pages: ClassVar[bool] = False

    @property
    def has_files(self) -> bool:
        """Whether pages are also written to files. `close` finishes pending writes."""
        return False

    @property
    def launched_copies(self) -> int:
        """Number of copies between the device and the source that have been launched so far."""
        return 0

    def has_pending_pages(self, completed: int) -> bool:
        """Returns whether pages are promised, or copies still running. `completed` is the number of
        copies that have completed.
        """
        return False

    def read_ahead(self, tokens: Ints, space: PrefixSpace, token_s: float) -> PromisedPages | None:
        """Starts to bring pages of a sequence nearer to the device, for example from files to the
        host's memory. Skips pages that the device or the host has.

        Returns None if there are no such pages, many pages are being read already, or computing is
        faster.

        Args:
            tokens: int32, the sequence.
            space: part of the cache that holds it.
            token_s: seconds to compute a token; 0 if unknown.
        """
        return None

    def fetch_after_match(
        self,
        tokens: Ints,
        match: Match,
        space: PrefixSpace,
        token_s: float,
        before: PromisedPages | None,
    ) -> PromisedPages | Literal["later"] | None:
        """Starts fetching the pages that follow a match to the device.

        Args:
            tokens: int32, the tokens that may be cached.
            match: cached pages of these tokens on the device.
            space: part of the cache that holds the sequence.
            token_s: seconds to compute a token; 0 if unknown.
            before: last promise for the same request, if any.

        Returns:
            The promise, possibly one that began earlier. "later" if the device's pages that it
            needs become free only after the running steps; the match may have changed by then. None
            if the source has too little, computing is faster, or the device has no room.
        """
        return None

    def list_pending_pages(self) -> Sequence[tuple[PrefixLock, Ints]]:
        """Returns, for each promise that is being copied to the device, its lock on the preceding
        pages and the device's pages that it owns.
        """
        return ()

    def add_arrived_pages(self) -> int:
        """Adds pages that have arrived on the device to the tree. Returns the number of completed
        copies, in either direction.
        """
        return 0

    def count_extra_pages(self, token_s: float) -> int:
        """Returns how many pages programs may use in addition to the device's, because the source
        keeps them. Returns 0 if fetching a page takes longer than computing it.

        Args:
            token_s: seconds to compute a token; 0 if unknown.
        """
        return 0

    def find_next_page(self, match: Match, tokens: Ints) -> NextPage | None:
        """Returns where the page after a match is, or None if the source lacks it."""
        return None

    def save_published(self, node: Node) -> None:
        """Saves a node whose pages have been added to the tree, if the policy requires it."""

    def save_kept_states(self, node: Node) -> None:
        """Saves the states that are kept for the prefix from the root to `node`, if the policy
        requires it.
        """

    def save_reused(self, node: Node) -> None:
        """Saves the nodes of the prefix up to `node`, which is reused now or will be later, if the
        policy requires it.
        """

    def save_evicted(self, node: Node) -> None:
        """Saves a node whose pages are being evicted from the device, if the policy requires it."""

    def save_node(self, node: Node) -> None:
        """Saves the pages of a node, as space permits."""

    def drop_pages(self, *, keep: bool = False) -> None:
        """Abandons all copies to the device, because the device's memory may be released. Unless
        `keep` is set, also abandons other promises and forgets the source's own pages, except
        files.
        """

    def start_copies(self) -> None:
        """Launches copies that were waiting for earlier ones."""

    def check_invariants(self) -> None:
        """Raises AssertionError if the source's own counts are wrong. For tests."""

    def stats(self) -> dict[str, int]:
        """Returns counts for `Engine.stats`."""
        return {}

    def close(self) -> None:
        """Finishes what is being saved, and releases the source's memory."""
