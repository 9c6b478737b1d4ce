"""The radix tree: which token sequences are in the KV cache, and on which pages.

Uses only host arrays. Keys are whole pages of tokens. A page in the tree belongs to the tree; a
request that reads it holds a `PrefixLock`. (RadixAttention: Zheng et al., arXiv:2312.07104.)
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_hash import PrefixHash, PrefixHasher
from sglang_lite.runtime.kv_cache.tree_changes import TreeChanges

# Key of the eviction order, lowest first. A node's key never decreases.
Priority: TypeAlias = "Callable[[Node], tuple[float, ...]]"

_REMEMBERED = 2**15  # number of remembered evictions

_NO_PAGES: Ints = np.empty(0, dtype=np.int32)


class Node:
    """Node of the tree: consecutive pages below `parent`. `locks` counts the locks on this node and
    its descendants. `names` holds the names of the node's pages (page_names.py) once they have been
    computed. In a root, it holds the namespace.
    """

    __slots__ = (
        "children", "created", "hits", "keys", "last_used", "locks", "names", "pages", "parent", "prefix", "queued",
        "tokens",
    )  # fmt: skip

    def __init__(self, tokens: Ints, pages: Ints, parent: Node | None, now: int) -> None:
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        # children by the bytes of their first page's tokens, newest last
        self.children: dict[bytes, Node] = {}
        # sorted keys of `children`, so that keys with a common beginning are neighbours
        self.keys: list[bytes] = []
        self.locks = 0
        self.queued = False  # whether the node is queued for eviction
        self.hits = 0
        self.created = self.last_used = now
        self.prefix: PrefixHash | None = None  # prefix up to the node's end; computed on first use
        self.names: list[bytes] | None = None

    @property
    def newest_child(self) -> Node | None:
        """Child that was added last, or None without children."""
        return next(reversed(self.children.values()), None)

    def leading_tokens(self, count: int) -> Ints:
        """Returns the first `count` tokens of the node and its descendants, following the newest
        child at each level.
        """
        found = [self.tokens[:count]]
        length = len(self.tokens)
        node = self.newest_child
        while node is not None and length < count:
            found.append(node.tokens[: count - length])
            length = length + len(node.tokens)
            node = node.newest_child
        return np.concatenate(found)


class EvictedPrefixes:
    """Approximate record of evicted prefixes: a hash table in which later entries overwrite earlier
    ones. Adding a prefix takes the hash of only one page, since nodes cache the hash of the tokens
    before it.
    """

    def __init__(self, hasher: PrefixHasher) -> None:
        self._empty = True
        self._hasher = hasher
        self._hashes = np.zeros(_REMEMBERED, dtype=np.uint64)

    def remember_eviction(self, parent: Node, page: Ints) -> None:
        found = self._hasher.extend_hash(prefix_hash_of(parent, self._hasher), page).hash
        self._hashes[found % _REMEMBERED] = found
        self._empty = False

    def remembers_eviction(self, parent: Node, page: Ints) -> bool:
        if self._empty:
            return False
        found = self._hasher.extend_hash(prefix_hash_of(parent, self._hasher), page).hash
        return int(self._hashes[found % _REMEMBERED]) == found


def prefix_hash_of(node: Node, hasher: PrefixHasher) -> PrefixHash:
    """Returns the length and hash of the tokens up to a node's end, and caches them in the node."""
    path: list[Node] = []
    current: Node | None = node
    while current is not None and current.prefix is None:
        path.append(current)
        current = current.parent
    assert current is not None  # every root has a prefix
    prefix = current.prefix
    assert prefix is not None
    for each in reversed(path):
        prefix = each.prefix = hasher.extend_hash(prefix, each.tokens)
    return prefix


class PrefixLock:
    """Lock that keeps the pages from the root to `node` in the tree until `release`. Releasing it
    again does nothing.
    """

    def __init__(self, tree: RadixTree, node: Node) -> None:
        self._tree = tree
        self.node: Node | None = node
        tree.adjust_lock_counts(node, +1)

    def unlock_prefix(self) -> None:
        if self.node is not None:
            self._tree.adjust_lock_counts(self.node, -1)
            self.node = None

    def unlock_last_pages(self, count: int) -> int:
        """Unlocks pages from the end of the prefix until `count` of them have become evictable.
        Stops early if nothing is locked any more. Returns how many pages have become evictable.
        """
        before = self._tree.locked_pages
        while self.node is not None and (left := count - before + self._tree.locked_pages) > 0:
            self.node = self._tree.move_lock_up(self.node, left)
        return before - self._tree.locked_pages

    def extend_with(self, tokens: Ints, pages: Ints) -> bool:
        """Adds pages to the tree after the locked ones, and locks them.

        Returns False, adding nothing, if the tree already has other pages there that begin with the
        same page of tokens, or if nothing was locked.

        Args:
            tokens: int32 token ids after those of the locked pages, a multiple of the page size.
            pages: page of each `page_size` tokens; arrays are copied.
        """
        grown = self.node and self._tree.add_locked_child(self.node, tokens, pages)
        if grown:
            self.node = grown
        return grown is not None

    def __enter__(self) -> PrefixLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.unlock_prefix()


@dataclass(frozen=True, slots=True)
class Tail:
    """Cached page that continues a matched prefix only for its first `count` tokens. These can be
    copied to another page.
    """

    node: Node
    page: int
    count: int


@dataclass(frozen=True, slots=True)
class Match:
    """Longest cached prefix of a sequence.

    Attributes:
        node: node at its end.
        pages: its pages, in order.
        tail: cached part of the page after it, if any.
    """

    node: Node
    pages: Ints
    tail: Tail | None = None

    def count_cached(self, page_size: int) -> int:
        """Returns the number of cached tokens, including those of the tail."""
        return len(self.pages) * page_size + (0 if self.tail is None else self.tail.count)


@dataclass(frozen=True, slots=True)
class Insertion:
    """Result of `RadixTree.insert_sequence`.

    Attributes:
        node: node at the end of the sequence.
        pages: the tree's pages of the whole sequence; the caller must read these from now on.
        duplicates: pages of the caller that the tree already had; the caller must free them.
    """

    node: Node
    pages: Ints
    duplicates: Ints


class RadixTree:
    """Prefix tree of token sequences, with the pages that hold their keys and values.

    Args:
        page_size: tokens in a page.
        priority: key of the eviction order.
        changes: records which prefixes the tree gains and loses, or None.

    Attributes:
        pages: number of pages in the tree.
        locked_pages: number of pages in the tree under a lock.
    """

    def __init__(
        self, page_size: int, priority: Priority, changes: TreeChanges | None = None
    ) -> None:
        self.page_size = page_size
        self._priority = priority
        self.changes = changes
        self._roots: dict[str, Node] = {}  # root of each namespace that has pages
        self._clock = 0
        self._hasher = PrefixHasher()
        self._evicted = EvictedPrefixes(self._hasher)
        # heap of all unlocked leaves and some other nodes
        self._queue: list[tuple[tuple[float, ...], int, Node]] = []
        self._queued = 0  # number of nodes queued so far
        self.pages = 0  # number of pages in the tree
        self.locked_pages = 0  # number of locked pages

    @property
    def evictable(self) -> int:
        return self.pages - self.locked_pages

    def rename_namespaces(self, suffix: str) -> None:
        """Appends a suffix to the name of every namespace. Prefixes cached so far can then be found
        only under the new names.
        """
        for node in self.iterate_nodes():
            node.prefix = None
        self._roots = {name + suffix: root for name, root in self._roots.items()}
        for name, root in self._roots.items():
            root.prefix = PrefixHash.for_namespace(name)
            root.names = [_name_bytes(name)]
        if self.changes is not None:
            self.changes.forget_all()

    def newest_namespaces(self, count: int) -> list[str]:
        """Returns the `count` namespaces whose first pages were added most recently."""
        return list(islice(reversed(self._roots), count))

    def remembers_evicted_page(self, node: Node, rest: Ints) -> bool:
        """Returns whether the first page of `rest` was once evicted from below `node`. Old
        evictions are forgotten, and a hash collision may give a false True.
        """
        return len(rest) >= self.page_size and self._evicted.remembers_eviction(
            node, rest[: self.page_size]
        )

    def match_prefix(
        self, tokens: Ints, namespace: str = "", covered: Callable[[int], int] | None = None
    ) -> Match:
        """Finds the longest cached prefix of `tokens`. Splits a node if the prefix's whole pages
        end inside it.

        Args:
            tokens: int32 token ids.
            namespace: namespace of the sequence.
            covered: returns the number of a page's tokens after which a tail can end, 0 for none.
                None if a tail can end after any token.
        """
        node, path, at = self._follow_and_split(tokens, namespace)
        pages = np.concatenate([n.pages for n in path]) if path else _NO_PAGES
        rest = tokens[at : at + self.page_size]
        if covered is None:
            return Match(node, pages, self._find_tail(node, rest))
        return Match(node, pages, self._find_covered_tail(node, rest, covered))

    def cached_length(self, tokens: Ints, namespace: str = "") -> int:
        """Returns how many of `tokens` are cached, in whole pages. Unlike `match_prefix`, doesn't
        change the tree.
        """
        node = self._roots.get(namespace)
        at = 0
        while node is not None:
            node = node.children.get(self._child_key(tokens[at:]))
            if node is not None:
                length = min(len(node.tokens), len(tokens) - at)
                differ = np.flatnonzero(node.tokens[:length] != tokens[at : at + length])
                at += int(differ[0]) if len(differ) else length
                if len(differ) or length < len(node.tokens):
                    break
        return at - at % self.page_size

    def lock_node(self, node: Node) -> PrefixLock:
        return PrefixLock(self, node)

    def insert_sequence(self, tokens: Ints, pages: Ints, namespace: str = "") -> Insertion:
        """Adds a sequence and its pages to the tree.

        Args:
            tokens: int32 token ids, a multiple of `page_size`.
            pages: page of each `page_size` tokens; arrays are copied.
            namespace: namespace of the sequence.
        """
        node, path, matched = self._follow_and_split(tokens, namespace)
        known = np.concatenate([n.pages for n in path]) if path else _NO_PAGES
        at = matched // self.page_size
        duplicates = pages[:at][pages[:at] != known]
        if at < len(pages):
            child = Node(tokens[matched:].copy(), pages[at:].copy(), node, self._clock)
            self._attach(child)
            self._queue_leaf(child)
            self.pages += len(child.pages)
            _record_change(self.changes, self._hasher, child, there=True)
            node = child
            if child.parent is not None and child.parent.parent is None:
                self._roots[namespace] = child.parent
        return Insertion(node, np.concatenate((known, pages[at:])), duplicates)

    def add_locked_child(self, node: Node, tokens: Ints, pages: Ints) -> Node | None:
        """Adds a child to `node`, moves a lock from `node` to the child, and returns the child.
        Returns None if another child begins with these tokens, or if `node` is a root, which may no
        longer be in the tree. `tokens` and `pages` are the arguments of `PrefixLock.extend_with`.
        """
        if node.parent is None or self._child_key(tokens) in node.children:
            return None
        self._clock += 1
        child = Node(tokens.copy(), pages.copy(), node, self._clock)
        child.locks = 1
        self._attach(child)
        self.pages += len(pages)
        self.locked_pages += len(pages)
        _record_change(self.changes, self._hasher, child, there=True)
        above: Node | None = node
        while above is not None:
            above.last_used = self._clock
            above = above.parent
        return child

    def evict_leaves(self, count: int, leaving: Callable[[Node], object] | None = None) -> Ints:
        """Removes unlocked leaves, lowest priority first, and returns their pages. Stops once at
        least `count` pages are removed, or no unlocked leaf is left.

        Args:
            leaving: called with each node before it is removed.
        """
        removed: list[Ints] = []
        out = 0
        rootless = False
        while self._queue and out < count:
            key, _, node = heapq.heappop(self._queue)
            node.queued = False
            if self._priority(node) != key:
                self._queue_leaf(node)
            elif not node.children and not node.locks:
                parent = node.parent
                assert parent is not None
                self._evicted.remember_eviction(parent, node.tokens[: self.page_size])
                if leaving is not None:
                    leaving(node)
                _record_change(self.changes, self._hasher, node, there=False)
                self._detach(node)
                removed.append(node.pages)
                out += len(node.pages)
                self.pages -= len(node.pages)
                rootless |= parent.parent is None and not parent.children
                self._queue_leaf(parent)
        if rootless:
            self._roots = {name: root for name, root in self._roots.items() if root.children}
        return np.concatenate(removed) if removed else _NO_PAGES

    def _queue_leaf(self, node: Node) -> None:
        """Queues a node for eviction if it is an unlocked leaf. Its entry stays in the queue if the
        node is later locked or used, since `evict_leaves` checks for that.
        """
        if not (node.queued or node.locks or node.children) and node.parent is not None:
            node.queued = True
            self._queued += 1
            heapq.heappush(self._queue, (self._priority(node), self._queued, node))

    def _child_key(self, tokens: Ints) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _attach(self, node: Node) -> None:
        assert node.parent is not None
        key = self._child_key(node.tokens)
        if key not in node.parent.children:
            insort(node.parent.keys, key)
        node.parent.children[key] = node

    def _detach(self, node: Node) -> None:
        assert node.parent is not None
        key = self._child_key(node.tokens)
        del node.parent.children[key]
        del node.parent.keys[bisect_left(node.parent.keys, key)]

    def _find_tail(self, node: Node, tokens: Ints) -> Tail | None:
        """Finds the page below `node` that shares the most leading tokens with `tokens`, fewer than
        a page. Returns None if no page shares any. Only the neighbours of `tokens` in key order
        need to be compared.
        """
        wanted = self._child_key(tokens)
        first = wanted[: tokens.itemsize]
        at = bisect_left(node.keys, wanted)
        best: Tail | None = None
        for key in node.keys[max(at - 1, 0) : at + 1]:
            if not key.startswith(first):  # the usual case
                continue
            child = node.children[key]
            differ = np.flatnonzero(child.tokens[: len(tokens)] != tokens)
            count = int(differ[0]) if len(differ) else len(tokens)
            if count > (best.count if best is not None else 0):
                best = Tail(child, int(child.pages[0]), count)
        return best

    def _find_covered_tail(
        self, node: Node, tokens: Ints, covered: Callable[[int], int]
    ) -> Tail | None:
        """Finds the page below `node` that gives `tokens` the longest tail that `covered` allows.
        Returns None if there is none.
        """
        best: Tail | None = None
        first = tokens[:1].tobytes()
        for key in node.keys[bisect_left(node.keys, first) :] if first else ():
            if not key.startswith(first):
                break
            child = node.children[key]
            count = covered(int(child.pages[0]))
            if count > (0 if best is None else best.count) and np.array_equal(
                child.tokens[:count], tokens[:count]
            ):
                best = Tail(child, int(child.pages[0]), count)
        return best

    def _follow_and_split(self, tokens: Ints, namespace: str) -> tuple[Node, list[Node], int]:
        """Follows `tokens` down the tree, splitting a node if they diverge inside it. Returns the
        last node, the path to it and the number of tokens covered.
        """
        self._clock += 1
        node = self._roots.get(namespace) or _new_root(namespace)
        path = []
        at = 0
        usable = len(tokens) - len(tokens) % self.page_size
        while at < usable:
            child = node.children.get(self._child_key(tokens[at:]))
            if child is None:
                break
            length = min(len(child.tokens), usable - at)
            differ = np.flatnonzero(child.tokens[:length] != tokens[at : at + length])
            common = int(differ[0]) if len(differ) else length
            common -= common % self.page_size
            if common < len(child.tokens):
                child = self._split_node(child, common)
            child.last_used = self._clock
            child.hits += 1
            path.append(child)
            node = child
            at += common
            if len(differ):
                break
        return node, path, at

    def _split_node(self, node: Node, at: int) -> Node:
        """Splits a node after its first `at` tokens. These move to a new node above it, which is
        returned.
        """
        assert node.parent is not None
        cut = at // self.page_size
        upper = Node(node.tokens[:at].copy(), node.pages[:cut].copy(), node.parent, node.created)
        upper.locks = node.locks
        upper.hits = node.hits
        upper.last_used = node.last_used
        if node.names is not None:
            upper.names = node.names[:cut]
            node.names = node.names[cut:]
        self._attach(upper)  # replaces `node`
        node.tokens, node.pages, node.parent = (
            node.tokens[at:].copy(),
            node.pages[cut:].copy(),
            upper,
        )
        self._attach(node)
        return upper

    def move_lock_up(self, node: Node, count: int) -> Node | None:
        """Moves a lock from a node towards the root, by at most `count` pages. Returns the node
        that has the lock afterwards, or None if the lock has reached the root.
        """
        if node.parent is None:
            return None
        if count < len(node.pages):
            self._split_node(node, (len(node.pages) - count) * self.page_size)
        node.locks -= 1
        if not node.locks:
            self.locked_pages -= len(node.pages)
            self._queue_leaf(node)
        return node.parent if node.parent.parent is not None else None

    def adjust_lock_counts(self, node: Node, change: int) -> None:
        current: Node | None = node
        while current is not None and current.parent is not None:
            before = current.locks
            current.locks = current.locks + change
            if not before or not current.locks:
                self.locked_pages += change * len(current.pages)
            current = current.parent
        if change < 0:
            self._queue_leaf(node)

    def iterate_nodes(self) -> Iterator[Node]:
        """Yields the nodes of all namespaces, without the roots."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())


def _new_root(namespace: str) -> Node:
    """Creates the root of a namespace that has no pages yet. `insert_sequence` adds it to the tree."""
    root = Node(_NO_PAGES, _NO_PAGES, None, 0)
    root.prefix = PrefixHash.for_namespace(namespace)
    root.names = [_name_bytes(namespace)]
    return root


def _name_bytes(namespace: str) -> bytes:
    return namespace.encode("utf-8", "surrogatepass")


def _record_change(
    changes: TreeChanges | None, hasher: PrefixHasher, node: Node, *, there: bool
) -> None:
    """Records the prefixes that the tree gains or loses when a node is added or removed."""
    if changes is not None and node.parent is not None:
        changes.record_digests(
            hasher.compute_digests(prefix_hash_of(node.parent, hasher), node.tokens, changes.every),
            there=there,
        )
