"""Checks the cache's invariants, which hold between any two steps. Tests run them after every step;
an idle engine counts the pages without an owner (core/recount.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache, SlotHandle
from sglang_lite.runtime.kv_cache.radix import Node, PrefixLock
from sglang_lite.runtime.kv_cache.state_pages import StatePages
from sglang_lite.runtime.kv_cache.window_pages import WindowPages


def check_cache(
    store: PrefixCache, handles: Iterable[SlotHandle], other_locks: Iterable[PrefixLock] = ()
) -> None:
    """Recounts everything that the cache counts, and checks its invariants.

    Args:
        store: the cache.
        handles: resources of all running requests.
        other_locks: locks that no running request holds.

    Raises:
        AssertionError: an invariant is violated; the message names it.
    """
    handles = list(handles)
    table = store.table
    size = store.page_size
    pending = store.source.list_pending_pages()
    nodes = list(store.tree.iterate_nodes())

    owners = _count_owners(store, handles)
    assert (owners <= 1).all(), f"pages with two owners: {np.flatnonzero(owners > 1)}"
    assert owners.all(), f"pages without an owner: {np.flatnonzero(owners == 0)}"

    slots = [h.slot for h in handles]
    assert len(set(slots)) == len(slots), "two requests in one slot"
    assert table.free + len(slots) == len(table.length), (
        "slots that nobody has and that are not free"
    )

    locks: Counter[int] = Counter()
    for lock in [
        *(h.lock for h in handles),
        *(copy.source for copy in store.pending_copies),
        *other_locks,
        *(lock for lock, _ in pending),
    ]:
        locked = lock.node
        while locked is not None and locked.parent is not None:
            locks[id(locked)] += 1
            locked = locked.parent
    wrong = [(node.locks, locks[id(node)]) for node in nodes if node.locks != locks[id(node)]]
    assert not wrong, f"locks (counted, held): {wrong}"
    assert store.tree.pages == sum(len(node.pages) for node in nodes), (
        "miscounted pages of the tree"
    )
    assert store.tree.locked_pages == sum(len(node.pages) for node in nodes if node.locks), (
        "miscounted locked pages"
    )
    for node in nodes:
        _check_node(node, size)

    store.source.check_invariants()
    if store.windows is not None:
        _check_windows(store, store.windows, handles, nodes)
    if store.states is not None:
        _check_states(store, store.states, handles, nodes)

    for h in handles:
        page_count = int(table.page_count[h.slot])
        known = int(table.known[h.slot])
        length = int(table.length[h.slot])
        computed = int(table.computed[h.slot])
        scored = length == table.limit[h.slot]  # the last token may be only scored, not computed
        assert known - scored <= length <= known + 1, "more than one token is unknown"
        assert computed <= length <= table.limit[h.slot], "computed or known beyond the end"
        assert computed <= page_count * size, "computed tokens without a page"
        prefix = _path_from_root(h.lock.node)
        pages = np.concatenate([node.pages for node in prefix]) if prefix else np.empty(0, np.int32)
        assert table.pages[h.slot, : h.owned_from].tolist() == pages[: h.owned_from].tolist(), (
            "reads others' pages"
        )
        assert len(pages) == h.owned_from, "locks another prefix than it reads"
        if prefix:
            tokens = np.concatenate([node.tokens for node in prefix])
            own = h.space.tree_ids(table.tokens[h.slot, : len(tokens)])
            assert np.array_equal(tokens, own), "reads a prefix of other tokens"


def count_lost_pages(store: PrefixCache, handles: Iterable[SlotHandle]) -> int:
    """Counts the pages without an owner, which no request can get any more.

    Args:
        store: the cache.
        handles: resources of all running requests.
    """
    lost = np.count_nonzero(_count_owners(store, handles) == 0)
    if store.windows is not None:
        pool = store.windows.pool
        of = store.windows.of
        lost += pool.total - pool.free - pool.quarantined - np.count_nonzero(of != pool.total)
    return int(lost)


def _count_owners(store: PrefixCache, handles: Iterable[SlotHandle]) -> NDArray[np.int64]:
    """Counts the owners of each page: int64 [pages]."""
    table = store.table
    owned = [
        store.pool.list_free_pages(),
        *(node.pages for node in store.tree.iterate_nodes()),
        *(pages for _, pages in store.source.list_pending_pages()),
        *(table.pages[h.slot, h.owned_from : table.page_count[h.slot]] for h in handles),
    ]
    return np.bincount(np.concatenate(owned), minlength=store.pool.total)


def _check_windows(
    store: PrefixCache, windows: WindowPages, handles: list[SlotHandle], nodes: list[Node]
) -> None:
    table = store.table
    null = windows.pool.total
    owners = Counter(
        [*windows.pool.list_free_pages().tolist(), *windows.of[windows.of != null].tolist()]
    )
    assert sorted(owners.elements()) == list(range(null)), (
        "window pages with two owners, or without one"
    )
    assert (windows.of[store.pool.list_free_pages()] == null).all(), "free pages with a window page"
    readers: Counter[int] = Counter(copy.from_page for copy in store.pending_copies)
    for h in handles:
        first = int(windows.first[h.slot])
        page_count = int(table.page_count[h.slot])
        readers.update(table.pages[h.slot, first:page_count].tolist())
        assert not windows.has_any_window_page(table.pages[h.slot, h.owned_from : first]), (
            "own pages behind the window"
        )
    assert all(windows.has_window_page(page) for page in readers), (
        "pages in a window without a window page"
    )
    counted = {
        page: int(windows.readers[page]) for page in np.flatnonzero(windows.readers).tolist()
    }
    assert counted == dict(readers), "miscounted readers"
    in_tree = np.concatenate([np.empty(0, np.int32), *(node.pages for node in nodes)])
    idle = sum(windows.has_window_page(page) and page not in readers for page in in_tree.tolist())
    assert windows.idle == idle == windows.count_idle(), "miscounted idle pages"


def _check_states(
    store: PrefixCache, states: StatePages, handles: list[SlotHandle], nodes: list[Node]
) -> None:
    table = store.table
    own = [table.pages[h.slot, h.owned_from : table.page_count[h.slot]] for h in handles]
    empty = np.empty(0, np.int32)
    states.check_invariants(np.concatenate([empty, *(node.pages for node in nodes), *own]))
    size = store.page_size
    for h in handles:
        pages = table.pages[h.slot, : table.page_count[h.slot]]
        with_state = np.flatnonzero(states.of[pages] != states.total)
        ends = with_state * size + states.at[pages[with_state]]
        # states beyond the computed tokens belong to pages of the tree, or are dropped before the
        # next step
        lacks = states.ends[h.slot] != table.computed[h.slot]
        assert lacks or (ends[with_state >= h.owned_from] <= table.computed[h.slot]).all(), (
            "a state of tokens that are not computed"
        )


def _check_node(node: Node, size: int) -> None:
    assert node.parent is not None
    assert len(node.tokens) == len(node.pages) * size > 0, "a node whose pages don't fit its tokens"
    assert node.parent.children[node.tokens[:size].tobytes()] is node, "a node under another key"
    assert node.keys == sorted(node.children), "keys that are not those of the children, in order"


def _path_from_root(node: Node | None) -> list[Node]:
    path: list[Node] = []
    while node is not None and node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]
