"""Pool of the KV cache's pages: which are free, and which must not be written yet."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]


class PagePool:
    """Allocator of pages, O(1) per page. Uses only host arrays.

    A freed page goes into quarantine, together with the numbers of the last step and of the last
    copy between tiers that may still use it. It can be allocated again once both have completed, so
    its contents don't change while they use it.

    Args:
        pages: number of pages.

    Attributes:
        total: number of pages.
        quarantined: number of pages in quarantine.
        settled_step, settled_copy: number of the last step and of the last copy that have
            completed.
    """

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._stack: Ints = np.arange(pages - 1, -1, -1, dtype=np.int32)
        self._top = pages
        self._quarantine: deque[tuple[int, int, Ints]] = deque()
        self.quarantined = self.settled_step = self.settled_copy = 0

    @property
    def free(self) -> int:
        return self._top

    def allocate(self, count: int) -> Ints:
        """Allocates `count` pages, in ascending order if the pool is new. The caller must ensure
        that they are free.
        """
        if count > self._top:
            raise AssertionError(f"{count} pages asked of {self._top}")
        self._top -= count
        return self._stack[self._top : self._top + count][::-1].copy()

    def quarantine_pages(self, pages: Ints, step: int, copy: int = 0) -> None:
        """Puts `pages` in quarantine, since steps up to `step` and copies up to `copy` may still
        use them.
        """
        if len(pages):
            self._quarantine.append((step, copy, pages.copy()))
            self.quarantined += len(pages)

    def return_to_pool(self, pages: Ints) -> None:
        """Frees `pages`, which nothing uses any more."""
        self._stack[self._top : self._top + len(pages)] = pages[::-1]
        self._top += len(pages)

    def settle_quarantine(self, step: int | None = None, copy: int | None = None) -> None:
        """Frees the quarantined pages whose steps and copies have completed.

        Args:
            step, copy: number of the last step and of the last copy that have completed; None if
                unchanged.
        """
        self.settled_step = self.settled_step if step is None else step
        self.settled_copy = self.settled_copy if copy is None else copy
        while self._quarantine and self._quarantine[0][0] <= self.settled_step:
            if self._quarantine[0][1] > self.settled_copy:
                break
            _, _, pages = self._quarantine.popleft()
            self.return_to_pool(pages)
            self.quarantined -= len(pages)

    def list_free_pages(self) -> Ints:
        """Returns the pages that are free or in quarantine, for the invariant checks."""
        return np.concatenate(
            [self._stack[: self._top], *(pages for _, _, pages in self._quarantine)]
        )
