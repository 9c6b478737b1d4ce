"""The prefix tree against a dictionary of prefixes, and the pool against counting."""

import gc
import sys
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.runtime.kv_cache.eviction_policy import EVICTION
from sglang_lite.runtime.kv_cache.pages import PagePool
from sglang_lite.runtime.kv_cache.radix import RadixTree

LRU = EVICTION["lru"]


def ints(values):
    return np.array(values, dtype=np.int32)


def test_pages_are_handed_out_once_and_come_back_after_their_step():
    pool = PagePool(4)
    a, b = pool.allocate(2), pool.allocate(1)
    assert sorted([*a, *b]) == [0, 1, 2]
    pool.quarantine_pages(a, step=5)
    assert (pool.free, pool.quarantined) == (1, 2)
    pool.settle_quarantine(4)
    assert pool.free == 1
    pool.settle_quarantine(5)
    assert (pool.free, pool.quarantined) == (3, 0)
    assert set(pool.list_free_pages()) == {0, 1, 3}
    with pytest.raises(AssertionError):
        pool.allocate(4)


sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)


@given(sequences, st.sampled_from([1, 2, 3]))
def test_matches_are_the_longest_inserted_prefixes(inserted, size):
    tree, known, following = RadixTree(size, LRU), {}, 0
    for tokens in inserted:
        tokens = tokens[: len(tokens) - len(tokens) % size]
        pages = ints(range(following, following + len(tokens) // size))
        following += len(pages)
        done = tree.insert_sequence(ints(tokens), pages)
        want = [
            known.setdefault(tuple(tokens[: (i + 1) * size]), int(page))
            for i, page in enumerate(pages)
        ]
        assert done.pages.tolist() == want
        assert done.duplicates.tolist() == [p for p, w in zip(pages.tolist(), want) if p != w]
    assert tree.pages == len(known)
    for tokens in inserted:
        probe = [*tokens, 1, 2]
        want = []
        while tuple(probe[: (len(want) + 1) * size]) in known and (len(want) + 1) * size <= len(
            probe
        ):
            want.append(known[tuple(probe[: (len(want) + 1) * size])])
        found = tree.match_prefix(ints(probe))
        assert found.pages.tolist() == want
        rest = probe[len(want) * size :][:size]
        beside = [
            key[len(want) * size :]
            for key in known
            if key[: len(want) * size] == tuple(probe[: len(want) * size])
        ]
        alike = [
            next((i for i, pair in enumerate(zip(key, rest)) if pair[0] != pair[1]), len(rest))
            for key in beside
            if key
        ]
        assert (found.tail.count if found.tail else 0) == max(alike, default=0)


def test_a_match_costs_as_much_beside_ten_cached_prompts_as_beside_ten_thousand():
    """Counted in calls. All prompts differ within the page behind one system prompt."""

    def calls(prompts):
        tree, random, count = RadixTree(16, LRU), np.random.default_rng(0), 0
        texts = [
            ints([*range(16), 7, *random.integers(0, 30_000, size=15)]) for _ in range(prompts)
        ]
        for i, text in enumerate(texts):
            tree.insert_sequence(text, ints([i, i]))

        def counted(frame, event, _):
            nonlocal count
            count += event in ("call", "c_call")

        wanted = ints([*texts[-1][:20], *range(12)])
        gc.collect()
        gc.disable()  # or what other tests have left may be finalised, and counted
        sys.setprofile(counted)
        match = tree.match_prefix(wanted)
        sys.setprofile(None)
        gc.enable()
        assert (len(match.pages), match.tail.count) == (1, 4)
        return count

    assert calls(10) == calls(10_000)


@given(sequences, sequences, st.sampled_from([1, 2, 3]), st.data())
def test_evicted_prefixes_are_remembered_however_nodes_were_split(inserted, again, size, data):
    tree, there, gone = RadixTree(size, LRU), set(), set()
    for first, several in ((True, inserted), (False, again)):
        for tokens in several:
            tokens = tokens[: len(tokens) - len(tokens) % size]
            tree.insert_sequence(ints(tokens), ints(range(len(tokens) // size)))
            there |= {tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)}
        tree.evict_leaves(data.draw(st.integers(0, 4)))
        gone |= {prefix for prefix in there if tree.cached_length(ints(prefix)) < len(prefix)}
        for tokens in [*inserted, *again, [0, 1, 2, 2, 1, 0, 1]]:
            node = tree.match_prefix(ints(tokens)).node
            cached = tree.cached_length(ints(tokens))
            after = tuple(tokens[: cached + size])
            told = tree.remembers_evicted_page(node, ints(tokens[cached:]))
            assert not told or after in gone
            if first and len(after) == cached + size:  # later, its first pages may be there again
                assert told == (after in gone)


def test_namespaces_are_forgotten_with_their_pages():
    tree, tokens = RadixTree(2, LRU), ints([1, 2, 3])
    for i in range(100):
        assert not len(tree.match_prefix(tokens, f"asked {i}").pages)
    assert len(tree.newest_namespaces(1000)) == 0
    for i in range(100):
        tree.insert_sequence(tokens[:2], ints([i]), f"used {i}")
    assert tree.newest_namespaces(2) == ["used 99", "used 98"]
    assert len(tree.evict_leaves(60)) == 60
    assert len(tree.newest_namespaces(1000)) == 40
    assert len(tree.evict_leaves(100)) == 40
    assert len(tree.newest_namespaces(1000)) == tree.pages == 0
    known = [
        tree.remembers_evicted_page(tree.match_prefix(tokens, f"used {i}").node, tokens[:2])
        for i in range(100)
    ]
    assert sum(known) >= 95  # a later one may have taken an earlier one's place
    assert not tree.remembers_evicted_page(tree.match_prefix(tokens, "asked 0").node, tokens[:2])


def test_no_more_than_so_many_evictions_are_remembered():
    tree = RadixTree(1, LRU)
    for first in range(200):
        tree.insert_sequence(ints([first % 7, first]), ints([0, 1]))
        tree.evict_leaves(2)
    assert tree.remembers_evicted_page(tree.match_prefix(ints([3])).node, ints([3]))
    assert not tree.remembers_evicted_page(tree.match_prefix(ints([99])).node, ints([99]))


@given(sequences, st.data())
def test_eviction_frees_everything_that_is_not_locked(inserted, data):
    tree, following = RadixTree(1, LRU), 0
    for tokens in inserted:
        tree.insert_sequence(ints(tokens), ints(range(following, following + len(tokens))))
        following += len(tokens)
    kept = data.draw(st.sampled_from(inserted))
    match = tree.match_prefix(ints(kept))
    with tree.lock_node(match.node):
        assert tree.locked_pages == len(kept)
        evictable = tree.evictable
        assert len(tree.evict_leaves(10_000)) == evictable
        assert tree.match_prefix(ints(kept)).pages.tolist() == match.pages.tolist()
    assert len(tree.evict_leaves(10_000)) == len(kept)
    assert tree.pages == tree.locked_pages == 0


def test_the_least_recently_used_leaf_goes_first():
    tree = RadixTree(1, LRU)
    tree.insert_sequence(ints([1, 2]), ints([0, 1]))
    tree.insert_sequence(ints([1, 3]), ints([9, 2]))
    tree.match_prefix(ints([1, 2]))
    assert tree.evict_leaves(1).tolist() == [2]


@pytest.mark.parametrize("policy", sorted(EVICTION))
def test_of_all_unlocked_leaves_the_lowest_goes_first(policy):
    priority, random = EVICTION[policy], Random(policy)
    tree, locks, following = RadixTree(1, priority), [], 0
    for _ in range(1_000):
        tokens = ints([random.randrange(3) for _ in range(random.randint(1, 5))])
        match random.choice(
            ["insert", "insert", "match", "lock", "grow", "shrink", "unlock", "evict", "evict all"]
        ):
            case "insert":
                following += len(tokens)
                tree.insert_sequence(tokens, ints(range(following - len(tokens), following)))
            case "match":
                tree.match_prefix(tokens)
            case "lock":
                locks.append(tree.lock_node(tree.match_prefix(tokens).node))
            case "grow" if locks:
                following += locks[-1].extend_with(tokens[:1], ints([following]))
            case "shrink" if locks:
                locks[-1].unlock_last_pages(1)
            case "unlock" if locks:
                locks.pop(random.randrange(len(locks))).unlock_prefix()
            case "evict":
                leaves = [
                    node for node in tree.iterate_nodes() if not node.children and not node.locks
                ]
                lowest = [
                    n.pages.tolist() for n in leaves if priority(n) == min(map(priority, leaves))
                ]
                assert tree.evict_leaves(1).tolist() in (lowest or [[]])
            case "evict all":
                evictable = tree.evictable
                assert len(tree.evict_leaves(evictable + 1)) == evictable


def test_namespaces_do_not_share():
    tree = RadixTree(1, LRU)
    tree.insert_sequence(ints([1]), ints([0]), "a")
    assert tree.match_prefix(ints([1]), "b").pages.tolist() == []
    assert tree.match_prefix(ints([1]), "a").pages.tolist() == [0]


@given(sequences, st.sampled_from([1, 2, 3]), st.data())
def test_a_lock_grows_as_if_the_whole_sequence_was_inserted(inserted, size, data):
    grown, whole, following = RadixTree(size, LRU), RadixTree(size, LRU), 0
    for tokens in inserted:
        tokens = ints(tokens[: len(tokens) - len(tokens) % size])
        pages = ints(range(following, following + len(tokens) // size))
        following += len(pages)
        first = data.draw(st.integers(0, len(pages)))
        done = grown.insert_sequence(tokens[: first * size], pages[:first])
        lock = grown.lock_node(done.node)
        if first == len(pages) or not lock.extend_with(tokens[first * size :], pages[first:]):
            grown.insert_sequence(tokens, ints([*done.pages, *pages[first:]]))
        lock.unlock_prefix()
        whole.insert_sequence(tokens, pages)
    assert (grown.pages, grown.locked_pages) == (whole.pages, 0)
    for tokens in inserted:
        assert (
            grown.match_prefix(ints(tokens)).pages.tolist()
            == whole.match_prefix(ints(tokens)).pages.tolist()
        )


def test_a_lock_that_grows_makes_all_above_it_recent():
    tree = RadixTree(1, LRU)
    lock = tree.lock_node(tree.insert_sequence(ints([1]), ints([0])).node)
    tree.insert_sequence(ints([2]), ints([1]))
    assert lock.extend_with(ints([3]), ints([2]))
    lock.unlock_prefix()
    assert tree.evict_leaves(1).tolist() == [1]
    assert tree.evict_leaves(2).tolist() == [2, 0]


def test_a_lock_is_released_once():
    tree = RadixTree(1, LRU)
    lock = tree.lock_node(tree.insert_sequence(ints([1]), ints([0])).node)
    lock.unlock_prefix()
    lock.unlock_prefix()
    assert tree.locked_pages == 0
