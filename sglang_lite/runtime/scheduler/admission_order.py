"""Order of admission of waiting requests: one function per policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import TypeAlias

from sglang_lite.runtime.kv_cache.radix import RadixTree
from sglang_lite.runtime.requests.request import Request

# Takes the requests that continue (retracted ones, and those of programs that keep their prefix),
# all others that wait, and the radix tree.
Policy: TypeAlias = Callable[[Sequence[Request], Sequence[Request], RadixTree], Iterable[Request]]

_LOOKED_AT = 128  # matching thousands of requests at each step would cost more than it saves
AGE_BOUND = 256  # maximum number of later requests admitted before a request
_ALIKE = 32  # number of tokens after the cached ones by which requests are grouped


def fcfs(
    returned: Sequence[Request], waiting: Sequence[Request], tree: RadixTree
) -> Iterable[Request]:
    """Yields requests first come, first served; those that continue go first."""
    return chain(returned, waiting)


def lpm(
    returned: Sequence[Request], waiting: Sequence[Request], tree: RadixTree
) -> Iterable[Request]:
    """Yields requests that continue, then all others by longest cached prefix. Prefixes are thus
    used before they are evicted.

    Requests that were passed over too often go before all other new ones (cache-aware scheduling:
    Zheng et al., arXiv:2312.07104).

    Among requests with equally long cached prefixes, those that share their next tokens are placed
    together, in the order of the first of them: level by level, this is the order of their prefix
    tree. Requests of one program are placed together, the one with the longest path to its
    program's end first.
    """
    yield from returned
    if len(waiting) < 2:
        yield from waiting
        return
    looked_at = list(islice(waiting, _LOOKED_AT))
    alike: dict[object, int] = {}  # index of the first request of each group
    programs: dict[int, tuple[int, int]] = {}  # by program: group and index of its first request
    keys: list[tuple[int, ...]] = []
    for i, request in enumerate(looked_at):
        if request.passed_over >= AGE_BOUND:
            keys.append((0, 0, i))
            continue
        ids, namespace = request.space.tree_key(request.tokens)
        cached = tree.cached_length(ids, namespace)
        next_tokens = ids[cached : cached + _ALIKE].tobytes()
        place = (alike.setdefault((cached, namespace, next_tokens), i), i)
        path = 0
        if request.branch is not None:
            place = programs.setdefault(id(request.branch.program), place)
            path = request.limit - len(request.tokens) + request.branch.expected.path
        keys.append((1, -cached, *place, -path))
    order = sorted(range(len(looked_at)), key=keys.__getitem__)
    yield from (looked_at[i] for i in order)
    yield from islice(waiting, _LOOKED_AT, None)


def priority(
    returned: Sequence[Request], waiting: Sequence[Request], tree: RadixTree
) -> Iterable[Request]:
    """Sorts requests by priority, highest first. Within a priority, requests that continue go
    first, then the others first come, first served. Requests that were passed over too often go
    before all others.
    """
    return sorted(chain(returned, waiting), key=lambda r: (r.passed_over < AGE_BOUND, -r.priority))


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "lpm": lpm, "priority": priority}
