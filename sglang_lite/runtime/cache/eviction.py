"""What leaves the prefix tree first: one key function per policy, lowest first."""

from __future__ import annotations

from collections.abc import Callable

from sglang_lite.runtime.cache.radix import Node

EVICTION: dict[str, Callable[[Node], float]] = {
    "lru": lambda node: node.last_used,
}
