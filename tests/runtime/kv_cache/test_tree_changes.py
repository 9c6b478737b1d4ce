"""What a tree tells of its changes, against the prefixes that it has."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_lite.runtime.kv_cache.eviction_policy import EVICTION
from sglang_lite.runtime.kv_cache.prefix_hash import PrefixHash, PrefixHasher, digest_interval
from sglang_lite.runtime.kv_cache.radix import RadixTree
from sglang_lite.runtime.kv_cache.tree_changes import TreeChanges

tokens = st.lists(st.integers(0, 2), min_size=1, max_size=14)
actions = st.one_of(
    st.tuples(st.just("insert"), tokens, st.sampled_from(["", "other"])),
    st.tuples(st.just("grow"), tokens, tokens),
    st.tuples(st.just("evict"), st.integers(1, 8), st.none()),
    st.tuples(st.just("retire"), st.none(), st.none()),
)


def ints(values):
    return np.array(values, np.int32)


def digests_of(texts, every, namespace=""):
    hasher, root = PrefixHasher(), PrefixHash.for_namespace(namespace)
    return {
        digest
        for text in texts
        for digest in hasher.compute_digests(root, ints(text), every).tolist()
    }


@given(st.lists(actions, max_size=25), st.sampled_from([(1, 1), (1, 3), (2, 4)]), st.data())
def test_whoever_follows_the_changes_knows_what_the_tree_has(actions, sizes, data):
    size, every = sizes
    changes = TreeChanges(every)
    tree, known = RadixTree(size, EVICTION["lru"], changes), set()
    for action, first, second in actions:
        if action == "insert":
            whole = first[: len(first) - len(first) % size]
            tree.insert_sequence(ints(whole), ints(range(len(whole) // size)), second)
        elif action == "grow":
            lock = tree.lock_node(tree.match_prefix(ints(first)).node)
            more = second[: len(second) - len(second) % size]
            if more:
                lock.extend_with(ints(more), ints(range(len(more) // size)))
            lock.unlock_prefix()
        elif action == "evict":
            tree.evict_leaves(first)
        else:
            tree.rename_namespaces(" x")
        if data.draw(st.booleans()) and (change := changes.take_changes()) is not None:
            known = (set() if change.forgotten else known) - {*change.lost.tolist()} | {
                *change.gained.tolist()
            }
    if (change := changes.take_changes()) is not None:
        known = (set() if change.forgotten else known) - {*change.lost.tolist()} | {
            *change.gained.tolist()
        }
    assert changes.take_changes() is None
    there = {
        namespace: [
            text for text in _texts(tree) if tree.cached_length(ints(text), namespace) == len(text)
        ]
        for namespace in ("", "other")
    }
    findable = set().union(
        *(digests_of(texts, every, namespace) for namespace, texts in there.items())
    )
    assert findable <= known
    gone = {
        digest
        for namespace in ("", "other")
        for digest in digests_of(_all_texts(actions), every, namespace)
    }
    assert known & (gone - findable) == set()


def _texts(tree):
    """The tokens from a root to each node's end."""
    found = []
    for node in tree.iterate_nodes():
        parts, current = [], node
        while current.parent is not None:
            parts.insert(0, current.tokens)
            current = current.parent
        found.append(np.concatenate(parts).tolist())
    return found


def _all_texts(actions):
    """Whatever the tree may ever have had: inserted texts, and what grew below their prefixes."""
    texts = [first for action, first, _ in actions if action in ("insert", "grow")]
    grown = [second for action, _, second in actions if action == "grow"]
    return texts + [
        text[:i] + more for text in texts for i in range(len(text) + 1) for more in grown
    ]


def test_changes_that_nobody_takes_are_forgotten_whole():
    changes = TreeChanges(1)
    changes.record_digests(np.arange(5, dtype=np.uint64), there=True)
    changes.record_digests(np.arange(2**17, dtype=np.uint64) + np.uint64(9), there=True)
    changes.record_digests(np.array([3], np.uint64), there=True)
    taken = changes.take_changes()
    assert (taken.forgotten, taken.gained.tolist(), taken.lost.tolist()) == (True, [3], [])


def test_digests_are_the_same_in_every_process():
    digests = PrefixHasher().compute_digests(
        PrefixHash.for_namespace("a\udcff"), np.arange(40, dtype=np.int32), 16
    )
    assert digests.tolist() == [5956295051329969859, 3749494632519012043]


def test_digests_end_with_whole_pages():
    assert [digest_interval(size) for size in (1, 2, 16, 24, 64)] == [16, 16, 16, 24, 64]
