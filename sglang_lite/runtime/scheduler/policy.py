"""Order of admission of waiting requests: one function per policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TypeAlias

from sglang_lite.runtime.kv_cache.radix import RadixTree
from sglang_lite.runtime.request import Request, State

Policy: TypeAlias = Callable[[Sequence[Request], RadixTree], Iterable[Request]]

_LOOKED_AT = 128  # matching a queue of thousands at each step would cost more than it saves
_AGE_BOUND = 256  # later requests that may be admitted before one


def fcfs(waiting: Sequence[Request], tree: RadixTree) -> Iterable[Request]:
    """First come, first served."""
    return list(waiting)


def lpm(waiting: Sequence[Request], tree: RadixTree) -> Iterable[Request]:
    """Longest cached prefix first, so that prefixes are used before they are evicted; those that were passed over too
    often before all (cache-aware scheduling: Zheng et al., arXiv:2312.07104)."""
    if len(waiting) < 2:
        return list(waiting)
    looked_at = list(islice(waiting, _LOOKED_AT))
    pressing = [r.state is State.RETRACTED or r.passed_over >= _AGE_BOUND for r in looked_at]
    cached = [0 if p else tree.cached_length(r.tokens, r.namespace) for r, p in zip(looked_at, pressing)]
    order = sorted(range(len(looked_at)), key=lambda i: (not pressing[i], -cached[i]))
    return [looked_at[i] for i in order] + list(islice(waiting, _LOOKED_AT, None))


def priority(waiting: Sequence[Request], tree: RadixTree) -> Iterable[Request]:
    """Highest priority first, and of those first come, first served."""
    return sorted(waiting, key=lambda r: -r.priority)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "lpm": lpm, "priority": priority}
