"""Pages, tree and slots together."""

import numpy as np

from sglang_lite.runtime.kv_cache.eviction_policy import EVICTION
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace

PAGES = 1024


def full_store():
    """A pool whose pages are all in the tree, read by nobody but a step that is under way."""
    store = PrefixCache(PAGES, 1, 4, PAGES, reuse=True, priority=EVICTION["lru"])
    for first in range(PAGES):  # a prompt a page, so that each can be evicted alone
        tokens = np.array([first], dtype=np.int32)
        handle = store.allocate_slot_for(
            tokens, store.match_usable(tokens, PrefixSpace()), PrefixSpace()
        )
        assert store.reserve_pages(handle.slot, 1)
        store.table.computed[handle.slot] = 1
        store.release_request(handle)
    store.step = 1
    return store


def test_requests_that_wait_for_pages_on_their_way_evict_no_more():
    store = full_store()
    assert [store.allocate(1) for _ in range(16)] == [None] * 16
    assert store.tree.pages == PAGES - PAGES // 64
    store.complete_steps(1)
    assert all(store.allocate(1) is not None for _ in range(16))
    assert store.tree.pages == PAGES - PAGES // 64


def test_what_pages_on_their_way_are_too_few_for_is_evicted():
    store = full_store()
    assert store.allocate(10) is None
    assert store.allocate(40) is None
    assert store.tree.pages == PAGES - 40
    store.complete_steps(1)
    assert len(store.allocate(40)) == 40
