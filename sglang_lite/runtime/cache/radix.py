"""The prefix tree: which token sequences are in the KV cache, and where.

Host arrays only. Keys are whole pages of tokens. A page in the tree belongs to the tree; a request that reads it holds
a `PrefixLock`. (RadixAttention: Zheng et al., arXiv:2312.07104.)
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from sglang_lite.runtime.cache.pages import Ints

_NO_PAGES: Ints = np.empty(0, dtype=np.int32)


class Node:
    """A run of pages below `parent`. `locks` counts the handles on this node or below it."""

    __slots__ = ("children", "created", "hits", "last_used", "locks", "pages", "parent", "tokens")

    def __init__(self, tokens: Ints, pages: Ints, parent: Node | None, now: int) -> None:
        self.tokens, self.pages, self.parent = tokens, pages, parent
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.hits = 0
        self.created = self.last_used = now


class PrefixLock:
    """Keeps the pages from the root to `node` in the tree until `release`, which may be called again."""

    def __init__(self, tree: RadixTree, node: Node) -> None:
        self._tree = tree
        self.node: Node | None = node
        tree._lock(node, +1)

    def release(self) -> None:
        if self.node is not None:
            self._tree._lock(self.node, -1)
            self.node = None

    def __enter__(self) -> PrefixLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix: its pages in order, and the node it ends in."""

    node: Node
    pages: Ints


@dataclass(frozen=True, slots=True)
class Insertion:
    """What `insert` did. `pages` are the tree's for the whole sequence: where it had some already (`duplicates` are
    the caller's own ones there), the caller must read those from now on and free its own."""

    node: Node
    pages: Ints
    duplicates: Ints


class RadixTree:
    """
    Args:
        page_size: tokens in a page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self.pages = 0  # in the tree
        self.locked_pages = 0  # of those, under a lock

    @property
    def evictable(self) -> int:
        return self.pages - self.locked_pages

    def match(self, tokens: Ints, namespace: str = "") -> Match:
        """The longest cached prefix of `tokens`, in whole pages. Nodes are split, so that it ends in a node."""
        node, path, _ = self._walk(tokens, namespace)
        return Match(node, np.concatenate([n.pages for n in path]) if path else _NO_PAGES)

    def lock(self, node: Node) -> PrefixLock:
        return PrefixLock(self, node)

    def insert(self, tokens: Ints, pages: Ints, namespace: str = "") -> Insertion:
        """Gives the tree a sequence and its pages.

        Args:
            tokens: whole pages of tokens.
            pages: where they are, one page per `page_size` tokens; arrays are copied.
        """
        node, path, matched = self._walk(tokens, namespace)
        known = np.concatenate([n.pages for n in path]) if path else _NO_PAGES
        at = matched // self.page_size
        duplicates = pages[:at][pages[:at] != known]
        if at < len(pages):
            child = Node(tokens[matched:].copy(), pages[at:].copy(), node, self._clock)
            node.children[self._key(child.tokens)] = child
            self.pages += len(child.pages)
            node = child
        return Insertion(node, np.concatenate((known, pages[at:])), duplicates)

    def evict(self, count: int, priority: Callable[[Node], float]) -> Ints:
        """Removes unlocked leaves, lowest priority first, until `count` pages are out or none is left."""
        heap = [(priority(n), i, n) for i, n in enumerate(self._nodes()) if not n.children and not n.locks]
        heapq.heapify(heap)
        order = len(heap)
        removed: list[Ints] = []
        out = 0
        while heap and out < count:
            _, _, node = heapq.heappop(heap)
            parent = node.parent
            assert parent is not None
            del parent.children[self._key(node.tokens)]
            removed.append(node.pages)
            out += len(node.pages)
            self.pages -= len(node.pages)
            if parent.parent is not None and not parent.children and not parent.locks:
                order += 1
                heapq.heappush(heap, (priority(parent), order, parent))
        return np.concatenate(removed) if removed else _NO_PAGES

    def _key(self, tokens: Ints) -> bytes:
        return tokens[: self.page_size].tobytes()

    def _root(self, namespace: str) -> Node:
        if namespace not in self._roots:
            self._roots[namespace] = Node(_NO_PAGES, _NO_PAGES, None, 0)
        return self._roots[namespace]

    def _walk(self, tokens: Ints, namespace: str) -> tuple[Node, list[Node], int]:
        """Follows `tokens` down; returns the last node, the path to it and how many tokens it covers."""
        self._clock += 1
        node, path, at = self._root(namespace), [], 0
        usable = len(tokens) - len(tokens) % self.page_size
        while at < usable:
            child = node.children.get(self._key(tokens[at:]))
            if child is None:
                break
            length = min(len(child.tokens), usable - at)
            differ = np.flatnonzero(child.tokens[:length] != tokens[at : at + length])
            common = int(differ[0]) if len(differ) else length
            common -= common % self.page_size
            if common < len(child.tokens):
                child = self._split(child, common)
            child.last_used = self._clock
            child.hits += 1
            path.append(child)
            node = child
            at += common
            if len(differ):
                break
        return node, path, at

    def _split(self, node: Node, at: int) -> Node:
        """Puts a new node between `node` and its parent that holds the first `at` tokens."""
        assert node.parent is not None
        cut = at // self.page_size
        upper = Node(node.tokens[:at].copy(), node.pages[:cut].copy(), node.parent, node.created)
        upper.locks, upper.hits, upper.last_used = node.locks, node.hits, node.last_used
        node.parent.children[self._key(upper.tokens)] = upper
        node.tokens, node.pages, node.parent = node.tokens[at:].copy(), node.pages[cut:].copy(), upper
        upper.children[self._key(node.tokens)] = node
        return upper

    def _lock(self, node: Node, change: int) -> None:
        current: Node | None = node
        while current is not None and current.parent is not None:
            before, current.locks = current.locks, current.locks + change
            if not before or not current.locks:
                self.locked_pages += change * len(current.pages)
            current = current.parent

    def _nodes(self) -> Iterator[Node]:
        """Every node but the roots."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
