"""Admission of waiting requests: each gets a slot, the cached pages of its prompt, and a promise of
more pages.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace
from sglang_lite.runtime.kv_cache.radix import Match
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.requests.request import Request, StreamPace
from sglang_lite.runtime.requests.resource import Resource
from sglang_lite.runtime.scheduler.admission_order import Policy
from sglang_lite.runtime.scheduler.page_fetches import PageFetches
from sglang_lite.runtime.scheduler.page_reserve import PageReserve
from sglang_lite.runtime.scheduler.pauses import ExpectedGrowth, Pauses, peak_growth
from sglang_lite.runtime.scheduler.queues import Queues
from sglang_lite.runtime.scheduler.retraction import request_slots

# A request waits for the cache if another one is computing at least this many tokens of its prompt.
_SHARED = 32
# number of plans until a refused request is reconsidered, if nothing was freed and none has come
_PLANS = 16
# States are kept where prompts stop being alike: maximum number of waiting requests to compare with
# a starting one, minimum number of tokens that a state saves, and maximum number of states.
_COMPARED = 64
_WORTH_A_STATE = 16
_SHARED_STATES = 4


class Admission:
    """Admits requests while there are enough pages for them, for the growth of running ones, and
    for paused programs.

    Args:
        store: pages, slots and radix tree.
        queues: requests, including the waiting ones.
        pauses: paused branches of programs.
        fetches: fetches of pages that the device lacks.
        reserve: estimate of growth.
        policy: order of admission.
        resources: resources that running requests hold in addition to a slot and pages.

    Attributes:
        refuses: True if the last plan admitted no request because paused programs are expected
            soon.
        solo_request: id of the request admitted last, if no other ran or waited then; otherwise -1.
        prompt_tokens, prompt_tokens_cached: number of tokens of all prompts so far, and how many of
            these were cached.
    """

    def __init__(
        self,
        store: PrefixCache,
        queues: Queues,
        pauses: Pauses,
        fetches: PageFetches,
        reserve: PageReserve,
        policy: Policy,
        resources: Sequence[Resource] = (),
    ) -> None:
        self._store = store
        self._queues = queues
        self._pauses = pauses
        self._fetches = fetches
        self._reserve = reserve
        self._policy = policy
        self._resources = resources
        self._admissions = 0
        self._started: list[Request] = []
        # at the last refusal: pages that were available; and number of plans since then
        self._refused: tuple[int, int] | None = None
        self.refuses = False
        self.solo_request = -1
        self.prompt_tokens = self.prompt_tokens_cached = 0

    def admit_requests(self, alone: Request | None = None) -> None:
        """Admits waiting requests while slots and pages last: first those that continue, then
        others in the policy's order.

        Args:
            alone: only request that may be admitted, or None for no such limit.
        """
        store = self._store
        table = self._store.table
        self.refuses = False
        if not self._queues.has_waiting or not table.free or self._can_skip_admission(alone):
            return
        promised, window_pages = self._promised_pages()
        programs = {
            r.branch: self._program_growth_after(r)
            for r in self._queues.running()
            if r.branch is not None
        }
        admitted: list[Request] = []
        prefilling = {r.slot: r for r in self._queues.prefilling}
        for request in self._candidates(alone):
            if not table.free:
                break
            if not all(each.may_start(request) for each in self._resources):
                continue
            tokens = request.tokens
            promise = request.cache.promise
            if promise is not None and not promise.done:
                continue
            reusable, match, cached = self._match_reusable(request)
            if store.reuses and _will_be_cached_soon(
                prefilling, table, reusable, cached, request.space
            ):
                continue
            needed = self._expected_pages(request) - len(match.pages)
            if request.branch is not None and request.branch not in programs:
                programs[request.branch] = self._program_growth_after(request)
            # so that the request's own prefix is not evicted to make room for the request
            with store.tree.lock_node(match.node):
                in_windows = store.count_window_pages(self._expected_pages(request))
                # if nothing runs, any request fits
                crowded = in_windows > window_pages and self._queues.has_running
                if crowded or not self._has_room(request, needed, promised, programs.values()):
                    self._refused = store.available, 0
                    break
            match, waits = self._fetches.fetch_missing(request, reusable, match, needed)
            if waits:
                promised += needed
                continue
            self._admissions += 1
            request.admission = self._admissions
            request.handle = store.allocate_slot_for(tokens, match, request.space)
            slot = request.handle.slot
            request.times.started = request.times.started or time.perf_counter()
            if request.cache.tokens < 0:
                request.cache.record_admission(min(int(table.computed[slot]), request.prompt_len))
                prompt = tokens[: request.prompt_len]
                paused = request.branch is not None and request.branch.evicted
                request.cache.miss = store.explain_miss(
                    prompt,
                    min(len(reusable), len(prompt)) - 1,
                    match,
                    request.handle,
                    paused=paused,
                )
                self.record_prompt_tokens(request)
            self.queue_prefill(request)
            prefilling[slot] = request
            admitted.append(request)
            promised = promised + needed
            window_pages = window_pages - in_windows
        queues = self._queues
        queues.remove_admitted(admitted)
        solo = (
            len(admitted) == 1
            and queues.prefilling == admitted
            and not (queues.has_waiting or queues.decoding)
        )
        self.solo_request = admitted[0].id if solo and admitted[0].ending is None else -1

    def forget_refusal(self) -> None:
        """Makes the next plan look at all waiting requests again, because a new one has been
        queued.
        """
        self._refused = None

    def _can_skip_admission(self, alone: Request | None) -> bool:
        """Returns whether waiting requests can be skipped, because one was refused and nothing has
        been freed since. With tens of thousands of waiting requests, looking at each takes longer
        than a step.
        """
        refused = self._refused
        self._refused = None
        if refused is None or alone is not None or not self._queues.has_running:
            return False
        available, plans = refused
        if self._store.available > available or plans == _PLANS:
            return False
        self._refused = available, plans + 1
        return True

    def _candidates(self, alone: Request | None) -> Iterable[Request]:
        ordered: Iterable[Request]
        if alone is not None:
            ordered = [alone] if alone.handle is None else []
        else:
            ordered = self._policy(self._queues.returned, self._queues.waiting, self._store.tree)
        for resource in self._resources:
            ordered = resource.order_candidates(ordered)
        return ordered

    def _match_reusable(self, request: Request) -> tuple[Ints, Match, int]:
        """Returns the tokens of a request that may be reused from the cache, the cache's match for
        these tokens, and how many of them are cached.
        """
        store = self._store
        tokens = request.tokens
        if request.score_from is not None:
            tokens = tokens[: max(request.score_from, 1)]
        match = store.match_usable(tokens, request.space)
        cached = match.count_cached(store.page_size)
        usable = min(
            (r.count_usable_cached(request, cached) for r in self._resources), default=cached
        )
        if usable < cached:
            tokens = tokens[:usable]
            match = store.match_usable(tokens, request.space)
            cached = match.count_cached(store.page_size)
        return tokens, match, cached

    def _expected_pages(self, request: Request) -> int:
        """Returns the number of pages for a request's tokens, including those it is expected to
        generate.
        """
        length = len(request.tokens)
        return -(
            -(length + self._reserve.reserved_tokens_for_request(length, request.limit))
            // self._store.page_size
        )

    def _program_growth_after(self, request: Request) -> ExpectedGrowth:
        """Returns how much a request's program is expected to grow after the request has ended."""
        assert request.branch is not None
        length = (
            len(request.tokens)
            if request.handle is None
            else int(self._store.table.length[request.slot])
        )
        length += self._reserve.reserved_tokens_for_request(length, request.limit)
        return ExpectedGrowth(
            request.rank, length, self._pauses.expected.expected_growth(request.branch, length)
        )

    def _has_room(
        self, request: Request, needed: int, promised: int, programs: Iterable[ExpectedGrowth]
    ) -> bool:
        """Returns whether a request can have its pages. Takes pages from paused branches if
        necessary.

        Args:
            needed: pages to be allocated for it.
            promised: pages that running requests are expected to need.
            programs: expected growth of programs after their running requests, including the
                request's own program.
        """
        store = self._store
        pauses = self._pauses
        branch = request.branch
        # All later programs give way to a request that continues. Only programs of lower priority
        # give way to other requests.
        after = (
            request.rank if pauses.keeps_queue_position(branch) else (-request.priority, math.inf)
        )
        extra = self._fetches.count_extra_pages()
        if branch is not None:  # a request without a program ends before programs have grown
            paused, given_up = pauses.growth_below_rank(after, beside=branch)
            growing = [*paused, *[each for each in programs if each.rank <= after]]
            growth = sum([each.growth for each in growing])
            if (
                needed + promised + given_up - (-growth // store.page_size)
                > store.available + extra
            ):
                growth = peak_growth(growing)
            promised += max(given_up - (-growth // store.page_size) - extra, 0)
        while (short := needed + promised - store.available) > 0:
            if pauses.release_overdue_pages(
                short, kept=extra > 0
            ) or pauses.release_lowest_ranked_pages(short, after):
                continue
            if pauses.release_for_longest_waiter(short, request.times.queued):
                continue
            if self._queues.has_running:
                return False
            if pauses.should_wait_idle(short, beside=branch):
                self.refuses = True
                return False
            if needed <= store.available or not pauses.release_last_returning_pages(
                needed - store.available, beside=branch
            ):
                return True  # no other request needs pages now, and each fits by itself
        return True

    def _promised_pages(self) -> tuple[int, int]:
        """Returns how many more pages running requests are expected to need. Also returns how many
        window pages remain once running requests and a step have those that they need; 0 if there
        are no window pages.
        """
        table = self._store.table
        slots = request_slots(self._queues.running())
        ends = table.length[slots] + self._reserve.reserved_tokens_for_rows(
            table.length[slots], table.limit[slots]
        )
        pages = -(-ends // self._store.page_size)
        promised = int((pages - table.page_count[slots]).sum())
        return promised, self._store.spare_window_pages(pages)

    def record_prompt_tokens(self, request: Request) -> None:
        """Counts the tokens of a request's prompt, once it is known how many are cached."""
        self.prompt_tokens += request.prompt_len
        self.prompt_tokens_cached += request.cache.tokens

    def queue_prefill(self, request: Request) -> None:
        """Queues a request that has a slot for prefill."""
        table = self._store.table
        slot = request.slot
        table.limit[slot] = request.limit
        if request.skips_last_token and table.computed[slot] < request.limit - 1:
            table.length[slot] = table.limit[slot] = request.limit - 1
        table.watched[slot] = request.watched
        table.paced[slot] = StreamPace.FIRST_TOKEN if request.paced else StreamPace.NONE
        table.streamed[slot] = request.output.stream
        table.scored[slot] = request.scored
        for resource in self._resources:
            resource.record_start(request)
        if self._store.states is not None:
            assert request.handle is not None
            shared = self._lengths_shared_with_waiting(request)
            self._store.want_states(request.handle, shared, prompt=int(table.length[slot]))
        self._queues.queue_prefilling(request)
        self._started.append(request)
        if request.branch is not None:
            self._pauses.end_pause(request.branch)
            request.branch.evicted = False

    def _lengths_shared_with_waiting(self, request: Request) -> list[int]:
        """Returns the lengths of the prefixes that a starting request shares with waiting ones. The
        lengths at which a kept state saves the most tokens come first.
        """
        table = self._store.table
        own = table.tokens[request.slot, : table.known[request.slot]]
        start = int(table.computed[request.slot])
        sharing = Counter[int]()
        for other in islice(chain(self._queues.returned, self._queues.waiting), _COMPARED):
            if other is request:
                continue
            length = min(len(own), len(other.tokens) - 1)
            differ = np.flatnonzero(own[:length] != other.tokens[:length])
            common = int(differ[0]) if len(differ) else length
            common = request.space.common_length_with(other.space, common)
            if common >= start + _WORTH_A_STATE:
                sharing[common] += 1
        saved = sorted(sharing, key=lambda common: sharing[common] * (common - start), reverse=True)
        return saved[:_SHARED_STATES]

    def pop_started_requests(self) -> list[Request]:
        """Returns the requests that got their slot since the last call."""
        started = self._started
        self._started = []
        return started


def _will_be_cached_soon(
    prefilling: Mapping[int, Request],
    table: SlotTable,
    tokens: Ints,
    matched: int,
    space: PrefixSpace,
) -> bool:
    """Returns whether a prefilling request will soon cache at least `_SHARED` more tokens of this
    prompt. If so, it pays to wait.

    Args:
        prefilling: prefilling requests by slot.
        table: slot table with their tokens.
        tokens: reusable tokens of the prompt.
        matched: number of these tokens that are cached.
        space: part of the cache that the prompt uses.
    """
    end = matched + _SHARED
    if len(tokens) <= end or not prefilling:
        return False
    # compared first, because most prompts differ at this token
    alike = (table.tokens[:, end - 1] == tokens[end - 1]).nonzero()[0]
    alike = alike[(table.tokens[alike, matched:end] == tokens[matched:end]).all(1)]
    return any(
        len(other.tokens) >= end
        and other.space.common_length_with(space, end) == end
        and np.array_equal(other.tokens[:end], tokens[:end])
        for other in map(prefilling.get, alike.tolist())
        if other is not None
    )
