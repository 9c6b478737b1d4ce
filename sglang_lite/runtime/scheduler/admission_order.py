"""Order in which waiting requests are admitted: one function per policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TypeAlias

from sglang_lite.runtime.kv_cache.radix import RadixTree
from sglang_lite.runtime.requests.request import Request, State

Policy: TypeAlias = Callable[[Sequence[Request], RadixTree], Iterable[Request]]

_LOOKED_AT = 128  # matching a queue of thousands at each step would cost more than it saves
_AGE_BOUND = 256  # maximum number of later requests that are admitted before a request
_ALIKE = 32  # tokens after the cached ones by which requests are grouped


def fcfs(waiting: Sequence[Request], tree: RadixTree) -> Iterable[Request]:
    """First come, first served; retracted requests and those of programs with a held prefix go first."""
    return sorted(waiting, key=_urgency)


def _urgency(request: Request) -> int:
    """Rank of a request, lower first: 0 if it was retracted or passed over too often, 1 if it continues a program with
    a held prefix, 2 for all others."""
    if request.state is State.RETRACTED or request.passed_over >= _AGE_BOUND:
        return 0
    return 1 if request.hints is not None and request.hints.locked else 2


def lpm(waiting: Sequence[Request], tree: RadixTree) -> Iterable[Request]:
    """Longest cached prefix first, so that prefixes are used before they are evicted; requests that were passed over
    too often go before all others (cache-aware scheduling: Zheng et al., arXiv:2312.07104).

    Among requests with equally long cached prefixes, those that share their next tokens are placed together, in the
    order of the first of them: level by level, this is the order of their prefix tree. Requests of one program are
    placed together, the one with the longest path to its program's end first.
    """
    if len(waiting) < 2:
        return list(waiting)
    looked_at = list(islice(waiting, _LOOKED_AT))
    alike: dict[object, int] = {}  # index of the first request of each group
    programs: dict[int, tuple[int, int]] = {}  # by program: group and index of its first request
    keys: list[tuple[int, ...]] = []
    for i, request in enumerate(looked_at):
        urgency, place, path = _urgency(request), (i, i), 0
        cached = tree.cached_length(request.tokens, request.namespace) if urgency else 0
        if urgency:
            next_tokens = request.tokens[cached : cached + _ALIKE].tobytes()
            place = alike.setdefault((cached, request.namespace, next_tokens), i), i
        if urgency and request.hints is not None:
            place = programs.setdefault(id(request.hints.program), place)
            path = request.limit - len(request.tokens) + request.hints.expected.path
        keys.append((urgency, -cached, *place, -path))
    order = sorted(range(len(looked_at)), key=keys.__getitem__)
    return [looked_at[i] for i in order] + list(islice(waiting, _LOOKED_AT, None))


def priority(waiting: Sequence[Request], tree: RadixTree) -> Iterable[Request]:
    """Highest priority first, and first come, first served within a priority; retracted requests and those of programs
    with a held prefix go before others of their priority. Requests that were passed over too often go before all
    others."""
    return sorted(waiting, key=lambda r: (r.passed_over < _AGE_BOUND, -r.priority, _urgency(r)))


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "lpm": lpm, "priority": priority}
