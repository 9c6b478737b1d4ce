"""Pool of the KV cache's pages: which are free, and which must not be written yet."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int32]


class PagePool:
    """Allocator of pages, O(1) per page. Uses host arrays only.

    A page is freed into quarantine, stamped with the last step that may still read it, and can be allocated again when
    that step has completed. So no running step sees the contents of its pages change.

    Args:
        pages: number of pages.

    Attributes:
        total: number of pages.
        quarantined: number of pages in quarantine.
    """

    def __init__(self, pages: int) -> None:
        self.total = pages
        self._stack: Ints = np.arange(pages - 1, -1, -1, dtype=np.int32)
        self._top = pages
        self._quarantine: deque[tuple[int, Ints]] = deque()
        self.quarantined = 0

    @property
    def free(self) -> int:
        return self._top

    def allocate(self, count: int) -> Ints:
        """Allocates `count` pages, in ascending order if the pool is new. The caller must make sure that they are
        free."""
        if count > self._top:
            raise AssertionError(f"{count} pages asked of {self._top}")
        self._top -= count
        return self._stack[self._top : self._top + count][::-1].copy()

    def release(self, pages: Ints, step: int) -> None:
        """Frees `pages`, which steps up to `step` may still read."""
        if len(pages):
            self._quarantine.append((step, pages.copy()))
            self.quarantined += len(pages)

    def settle(self, step: int) -> None:
        """Frees the quarantined pages that only steps up to `step` may read, all of which have completed."""
        while self._quarantine and self._quarantine[0][0] <= step:
            _, pages = self._quarantine.popleft()
            self._stack[self._top : self._top + len(pages)] = pages[::-1]
            self._top += len(pages)
            self.quarantined -= len(pages)

    def free_pages(self) -> Ints:
        """Pages that are free or in quarantine, for the invariant checks."""
        return np.concatenate([self._stack[: self._top], *(pages for _, pages in self._quarantine)])
