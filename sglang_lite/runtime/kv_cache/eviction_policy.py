"""Order of eviction from the radix tree: one key function per policy, lowest key first."""

from __future__ import annotations

from sglang_lite.runtime.kv_cache.radix import Node, Priority


def lru(node: Node) -> tuple[float, ...]:
    """Returns a key that orders nodes by time of last use, least recent first."""
    return (node.last_used,)


def lfu(node: Node) -> tuple[float, ...]:
    """Returns a key that orders nodes by number of uses, fewest first, then by time of last use."""
    return node.hits, node.last_used


def fifo(node: Node) -> tuple[float, ...]:
    """Returns a key that orders nodes by age, oldest first."""
    return (node.created,)


def slru(node: Node) -> tuple[float, ...]:
    """Returns a key that orders prefixes that were never reused before all others, then by time of
    last use, least recent first (segmented LRU: Karedla et al., 1994).
    """
    return node.hits > 0, node.last_used


EVICTION: dict[str, Priority] = {"lru": lru, "lfu": lfu, "fifo": fifo, "slru": slru}
