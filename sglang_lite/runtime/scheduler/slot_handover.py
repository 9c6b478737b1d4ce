"""Slot handover: the next request of a program continues in the slot of the previous one."""

from __future__ import annotations

import time

from sglang_lite.runtime.kv_cache.cache_miss import continued_slot_miss
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.requests.request import Request, State
from sglang_lite.runtime.scheduler.admission import Admission
from sglang_lite.runtime.scheduler.queues import Queues


def start_in_slot(
    store: PrefixCache,
    queues: Queues,
    admission: Admission,
    request: Request,
    following: Request,
    *,
    appended: bool,
) -> int | None:
    """Finishes a running request and starts the next one in its slot.

    Args:
        store: pages, slots and radix tree.
        queues: requests that have not ended.
        admission: counts and starts the next request.
        request: request that has ended.
        following: the next one.
        appended: whether the tokens of `following` are those of `request`, possibly without the
            last one, followed by more tokens.

    Returns:
        Number of tokens appended to those in the slot. None if nothing was changed, because
        `following` would have to change pages of the tree, which others may read, or because
        another variant of the model computes it.
    """
    table = store.table
    slot = request.slot
    handle = request.handle
    tokens = following.tokens
    assert handle is not None
    before = table.tokens[slot, : table.known[slot]]
    known = len(before)
    common = (
        known - bool(tokens[known - 1] != before[-1])
        if appended
        else _common_prefix_length(before, tokens)
    )
    common = following.space.common_length_with(request.space, common)
    kept = max(handle.owned_from * store.page_size, 1)
    if common < kept or not following.space.has_same_model(request.space):
        return None
    request.tokens = before.copy()
    queues.remove_running(request)
    request.change_state(State.FINISHED)
    request.handle = None
    table.tokens[slot, common : len(tokens)] = tokens[common:]
    table.length[slot] = table.known[slot] = len(tokens)
    table.computed[slot] = min(int(table.computed[slot]), common, len(tokens) - 1)
    table.epoch[slot] += 1
    handle.space = following.space
    # otherwise, the next step publishes the pages
    if not appended or len(tokens) - common > store.page_size:
        store.publish_pages(handle)  # for branches that fork here
        store.keep_state(handle)
        # an earlier run of the same program may have left more in the cache
        store.adopt_cached_pages(handle)
    following.handle = handle
    following.admission = request.admission
    following.times.started = time.perf_counter()
    following.cache.tokens = int(table.computed[slot])
    cached = following.cache.tokens
    following.cache.miss = continued_slot_miss(tokens, cached) if cached < len(tokens) - 1 else None
    following.change_state(State.WAITING)
    admission.record_prompt_tokens(following)
    admission.queue_prefill(following)
    return len(tokens) - common


def _common_prefix_length(a: Ints, b: Ints) -> int:
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    at = int(differ.argmax()) if length else 0
    return at if length and differ[at] else length
