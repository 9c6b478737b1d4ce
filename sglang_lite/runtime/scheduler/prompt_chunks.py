"""Chunks of prompts: where each ends within a step's budget, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_lite.runtime.requests.request import Request
from sglang_lite.runtime.requests.resource import ChunkCut


def chunk_end(
    request: Request,
    start: int,
    length: int,
    budget: int,
    cuts: Iterable[ChunkCut] = (),
    *,
    first: bool = True,
) -> int:
    """Returns the end of the next chunk of a prompt; `start` if it has to wait for another step.

    A cut by one rule may require a further cut by another rule, so the rules are applied until none
    of them shortens the chunk. If a rule then lengthens the chunk, that end is final: no other rule
    may cut inside the part that the rule keeps whole.

    Args:
        request: request whose prompt is computed.
        start: position of the first token to compute.
        length: end of the prompt.
        budget: cost that the step has room for; see `chunk_cost`.
        cuts: rules about where chunks end.
        first: whether it is the step's first chunk, which a rule may also lengthen.
    """
    end = _end_within_budget(request, start, length, max(budget, 0))
    while end > start:
        ends = [cut(request, start, end, first=first) for cut in cuts]
        shortest = min(ends, default=end)
        if shortest >= end:
            return max(ends, default=end)
        end = shortest
    return start


def chunk_cost(request: Request, start: int, end: int) -> int:
    """Returns the cost of a chunk in tokens. Positions that need logits cost two, so that a step
    with them takes no longer.
    """
    if request.score_from is None:
        return end - start
    return (end - start) + max(end - max(start, request.score_from - 1), 0)


def _end_within_budget(request: Request, start: int, length: int, budget: int) -> int:
    if request.score_from is None:
        return min(length, start + budget)
    plain = min(budget, max(request.score_from - 1 - start, 0))
    return min(length, start + plain + (budget - plain + 1) // 2)
