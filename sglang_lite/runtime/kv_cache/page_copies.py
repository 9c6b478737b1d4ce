"""Copies of the beginning of a cached page. They are needed when a cached prefix ends inside a
page, since the request must continue in a page of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.radix import PrefixLock

NO_COPIES: Ints = np.zeros((2, 0), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy of the first `count` tokens of a page in the tree to a page owned by the request in
    `slot`. `source` locks the tree's page.
    """

    slot: int
    source: PrefixLock
    from_page: int
    to_page: int
    count: int


def token_slots_to_copy(
    copies: Sequence[PageCopy], page_size: int, pages: Ints | None = None
) -> Ints:
    """Returns the source and destination token slots of copies, int32 [2, N].

    Args:
        copies: the copies.
        page_size: tokens in a page.
        pages: substitute for each page; None for the pages themselves.
    """
    if not copies:
        return NO_COPIES
    ends = np.array([(copy.from_page, copy.to_page) for copy in copies], dtype=np.int32).T
    ends = ends if pages is None else pages[ends]
    counts = np.array([copy.count for copy in copies])
    offsets = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    slots: Ints = (np.repeat(ends * page_size, counts, axis=1) + offsets).astype(np.int32)
    return slots
