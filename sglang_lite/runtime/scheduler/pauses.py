"""Pauses: branches of programs between two requests. Their prefixes stay in the cache unless others
need the pages more.

A branch pauses while its caller computes (a tool, a check, plain Python), while other branches of
its program run, and while its next request is prepared or waits. Its prefix is locked, and room is
promised for its next request. Pages are given up in this order, each time from the end of a prefix
and only as many as needed:

- those of branches that return so late that others should use the pages meanwhile. A page is worth
  keeping if it is used again in less time than it takes to compute all pages (Gray and Putzolu's
  five-minute rule, 1987). The bound is `_WORTH` times as long, because a busy device gains little
  from more rows.
- if running requests lack pages, those of the programs that came last.
- if nothing runs, those of the branch that returns last, unless one returns soon.
- those of the program that came last, if others have waited very long.

A branch that was away too long waits like a new one when it returns. Other branches continue before
new requests, and get their pages back as soon as there is room.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache
from sglang_lite.runtime.kv_cache.prefix_space import PrefixSpace
from sglang_lite.runtime.kv_cache.radix import PrefixLock
from sglang_lite.runtime.requests.scheduled_branch import ScheduledBranch
from sglang_lite.runtime.scheduler.page_reserve import PageReserve

_FIRST_S = 1.0  # expected pause after a node without earlier pauses
_LAST = 32  # recent values per name, whose median is expected
_NAMES = 1024  # remembered names
_SHORT_S = 5.0  # a shorter pause is never too long
_WORTH = 8
# an idle device takes pages if no branch returns within this multiple of the time to compute them
_IDLE_WORTH = 4
_IDLE_SHARE = 0.1  # share of computed tokens that may be recomputed because the device was idle
# like _SHORT_S and _WORTH, for requests that have waited very long
_AGED_S = 60.0
_AGED_WORTH = 64
# entries of ended pauses that are always tolerated; each keeps its program in memory
_OUTDATED = 32
_MEASURED = 32  # minimum number of tokens of a step whose time counts


class Medians:
    """Medians of the most recent values of each name.

    Args:
        first: median for a name without values.
    """

    def __init__(self, first: float) -> None:
        self._first = first
        self._values: dict[str | None, deque[float]] = {}

    def median_for_name(self, name: str | None) -> float:
        values = self._values.get(name)
        return median(values) if values else self._first

    def add_sample_value(self, name: str | None, value: float) -> None:
        if name not in self._values and len(self._values) == _NAMES:
            del self._values[next(iter(self._values))]
        self._values.setdefault(name, deque(maxlen=_LAST)).append(value)


class Expectations:
    """Expected pauses and growth of branches.

    Args:
        most: maximum expected growth of a branch, in tokens.
        reserve: estimate of the tokens that requests will generate.
    """

    def __init__(self, most: int, reserve: PageReserve) -> None:
        self._most = most
        self._reserve = reserve
        self._times = Medians(_FIRST_S)  # seconds of pauses, by the name of the node before
        self._lengths = Medians(0)  # tokens of ended branches, by their kind

    def take_expected_pause_s(self, branch: ScheduledBranch) -> float:
        """Returns how many seconds a branch is expected to pause: the duration that its caller has
        reported for this pause, otherwise the usual one.
        """
        told = branch.next_pause_s
        branch.next_pause_s = None
        return self._times.median_for_name(branch.name) if told is None else told

    def expected_growth(self, branch: ScheduledBranch, length: int) -> int:
        """Returns how many tokens a branch of `length` tokens is expected to add: those of its
        queued nodes. While its program is open, the branch is also expected to reach the usual
        length of its kind. If the kind is unknown, it is expected to double.
        """
        tokens = self._reserve.reserved_tokens_for_program(branch.expected)
        if branch.program.open:
            usual = self._lengths.median_for_name(branch.kind)
            tokens = max(tokens, round(usual) - length if usual else length)
        return min(tokens, self._most)

    def record_pause(self, branch: ScheduledBranch, seconds: float) -> None:
        """Records how long a branch has paused."""
        self._times.add_sample_value(branch.name, seconds)

    def record_length(self, branch: ScheduledBranch) -> None:
        """Records the length of a branch that has ended."""
        if branch.length:
            self._lengths.add_sample_value(branch.kind, branch.length)


@dataclass(frozen=True, slots=True)
class ExpectedGrowth:
    """Expected growth of a branch.

    Attributes:
        rank: rank of its program, like `Request.rank`.
        length: its tokens.
        growth: tokens that it will add.
    """

    rank: tuple[int, float]
    length: int
    growth: int


def peak_growth(branches: Sequence[ExpectedGrowth]) -> int:
    """Returns the most tokens that branches add to memory at any one time. All are assumed to grow
    at the same pace, and each frees its tokens when it ends.
    """
    if not branches:
        return 0
    lengths, growth = np.array([(each.length, each.growth) for each in branches], dtype=np.int64).T
    order = growth.argsort()
    freed = lengths[order].cumsum() - lengths[order]  # by branches that end earlier
    return max(int((growth[order] * np.arange(len(growth), 0, -1) - freed).max()), 0)


@dataclass(eq=False, slots=True)
class PausedBranch:
    """Pause of a branch.

    Attributes:
        branch: the branch.
        tokens: int32, its text.
        space: part of the prefix cache that the branch uses.
        lock: lock on the part of its prefix that has not been given up.
        rank: rank of its program, like `Request.rank`.
        began: when the pause began.
        expected_s: expected duration.
        due: time after which the pause is too long.
        ahead: growth of the branch.
        pages: number of pages that the branch has given up, and needs when it returns.
        given_up: True if the program waits like a new one when it returns, because it returned too
            late.
    """

    branch: ScheduledBranch
    tokens: Ints
    space: PrefixSpace
    lock: PrefixLock
    rank: tuple[int, float]
    began: float
    expected_s: float
    ahead: ExpectedGrowth
    due: float = 0.0
    pages: int = 0
    given_up: bool = False

    @property
    def has_locked_pages(self) -> bool:
        return self.lock.node is not None

    def set_overdue_time(self, worth_s: float) -> float:
        """Sets when the pause counts as too long. That is after `worth_s` seconds, or from its
        beginning if it is expected to take longer.
        """
        self.due = self.began + worth_s * (self.expected_s <= worth_s)
        return self.due

    def remaining_s(self, now: float) -> float:
        """Returns the expected seconds until the branch returns. If it is overdue, it is expected
        to take as long again as it has been away.
        """
        away = now - self.began
        return self.expected_s - away if away < self.expected_s else away


class Pauses:
    """Pauses of all programs, at most one per branch.

    Args:
        store: cache that holds the prefixes.
        reserve: estimate of growth.

    Attributes:
        now: clock, in seconds.
        expected: expectations about branches.
        pages_given_up: number of locked pages given up so far.
        token_s: seconds to compute a token of a prompt; 0 if unknown.
    """

    def __init__(self, store: PrefixCache, reserve: PageReserve) -> None:
        self._store = store
        # No branch counts for more than half of the pool.
        self.expected = Expectations(store.pool.total * store.page_size // 2, reserve)
        self.now: Callable[[], float] = time.perf_counter
        self.pages_given_up = 0
        self.token_s = 0.0
        self._pauses: dict[ScheduledBranch, PausedBranch] = {}
        self._wanted: dict[ScheduledBranch, tuple[Ints, PrefixSpace]] = {}
        # pauses with locked pages, by rank
        self._by_rank: list[tuple[tuple[int, float], int, PausedBranch]] = []
        # heap: when a pause is too long; entries may be outdated
        self._due: list[tuple[float, int, PausedBranch]] = []
        self._too_long: list[PausedBranch] = []
        self._count = 0
        self._again = 0.0  # number of tokens that may be given up on an idle device

    def __len__(self) -> int:
        return len(self._pauses)

    def __iter__(self) -> Iterator[PausedBranch]:
        return iter(self._pauses.values())

    def keeps_queue_position(self, branch: ScheduledBranch | None) -> bool:
        """Returns whether a branch is paused and will go before new requests when it returns."""
        pause = None if branch is None else self._pauses.get(branch)
        return pause is not None and not pause.given_up

    # ---------------------------------------------------------------------------- beginning and end

    def pause_at_next_step(self, branch: ScheduledBranch, tokens: Ints, space: PrefixSpace) -> None:
        """Schedules a pause for the next step, when the tokens of running requests have been
        published.
        """
        if len(tokens):
            self._wanted[branch] = tokens, space

    @property
    def has_requested_pauses(self) -> bool:
        """Whether pauses have been requested since the last step."""
        return bool(self._wanted)

    def begin_requested_pauses(self) -> None:
        """Begins the pauses requested since the last step."""
        wanted = self._wanted
        self._wanted = {}
        for branch, (tokens, space) in wanted.items():
            self.begin_pause(branch, tokens, space)

    def begin_pause(self, branch: ScheduledBranch, tokens: Ints, space: PrefixSpace) -> None:
        """Begins a pause of a branch, and ends its previous pause if there is one. Locks the cached
        part of the branch's text.
        """
        branch.length = len(tokens)
        if not self._store.reuses or not branch.may_return:
            return
        lock = self._store.tree.lock_node(
            self._store.tree.match_prefix(*space.tree_key(tokens)).node
        )
        self.end_pause(branch)
        rank = -branch.program.priority, branch.program.arrival
        ahead = ExpectedGrowth(
            rank, len(tokens), self.expected.expected_growth(branch, len(tokens))
        )
        pause = PausedBranch(
            branch,
            tokens,
            space,
            lock,
            rank,
            self.now(),
            self.expected.take_expected_pause_s(branch),
            ahead,
        )
        self._pauses[branch] = pause
        self._count += 1
        insort(self._by_rank, (rank, self._count, pause))
        heapq.heappush(
            self._due, (pause.set_overdue_time(self._max_worthwhile_pause_s), self._count, pause)
        )

    def set_expected_pause(self, branch: ScheduledBranch, seconds: float) -> None:
        """Sets how many seconds a branch's caller needs. They count from now if the branch already
        waits for the caller, otherwise from the beginning of the next pause.
        """
        pause = self._pauses.get(branch)
        if pause is None or not branch.awaits_caller:
            branch.next_pause_s = seconds
            return
        pause.expected_s = self.now() - pause.began + seconds
        self._count += 1
        heapq.heappush(
            self._due, (pause.set_overdue_time(self._max_worthwhile_pause_s), self._count, pause)
        )
        self._compact_entries()

    def record_return(self, branch: ScheduledBranch) -> None:
        """Records that the branch's next request has arrived."""
        pause = self._pauses.get(branch)
        if pause is not None:
            self.expected.record_pause(branch, self.now() - pause.began)

    def end_branch(self, branch: ScheduledBranch) -> None:
        """Ends the pause of a branch that has ended, and records its length."""
        self.end_pause(branch)
        self.expected.record_length(branch)

    def end_pause(self, branch: ScheduledBranch) -> None:
        """Ends a branch's pause, because a request now reads the prefix or the branch no longer
        needs it.
        """
        self._wanted.pop(branch, None)
        pause = self._pauses.pop(branch, None)
        if pause is not None:
            pause.lock.unlock_prefix()
            place = bisect_left(self._by_rank, (pause.rank,))
            while self._by_rank[place][2] is not pause:
                place += 1
            del self._by_rank[place]
            self._compact_entries()

    def _compact_entries(self) -> None:
        """Drops the entries of ended pauses once they outnumber the others. Without this, they
        would stay until memory is short and `release_overdue_pages` finds them.
        """
        if len(self._due) + len(self._too_long) > 2 * len(self._pauses) + _OUTDATED:
            self._due = list(
                {entry[2]: entry for entry in self._due if self._is_current(entry)}.values()
            )
            heapq.heapify(self._due)
            self._too_long = [
                each for each in self._too_long if self._pauses.get(each.branch) is each
            ]

    def _is_current(self, entry: tuple[float, int, PausedBranch]) -> bool:
        """Returns whether the pause of an entry continues and is still due at the same time."""
        due, _, pause = entry
        return self._pauses.get(pause.branch) is pause and pause.due == due

    def end_all_pauses(self) -> None:
        """Ends all pauses."""
        self._wanted.clear()
        for branch in list(self._pauses):
            self.end_pause(branch)

    # --------------------------------------------------------------------------------- expectations

    def growth_below_rank(
        self, rank: tuple[int, float], *, beside: ScheduledBranch | None
    ) -> tuple[list[ExpectedGrowth], int]:
        """Returns the expected growth of paused programs whose ranks are lower than `rank`. Also
        returns how many pages these programs gave up and will need when they return.

        Args:
            beside: branch whose program does not count.
        """
        own = None if beside is None else beside.program
        paused = [
            each
            for other, _, each in self._by_rank
            if other < rank and each.branch.program is not own
        ]
        return [each.ahead for each in paused], sum(each.pages for each in paused)

    def record_duration(self, tokens: int, seconds: float) -> None:
        """Records the duration of a step that computed tokens of prompts."""
        self._again += _IDLE_SHARE * tokens
        if tokens >= _MEASURED:
            each = seconds / tokens
            self.token_s += (each - self.token_s) / 16 if self.token_s else each

    @property
    def _max_worthwhile_pause_s(self) -> float:
        """Seconds a pause may take before its pages are worth more to others."""
        return max(_SHORT_S, _WORTH * self._recompute_pool_s)

    @property
    def _recompute_pool_s(self) -> float:
        """Seconds it would take to compute all tokens that fit into the page pool."""
        return self._store.pool.total * self._store.page_size * self.token_s

    # ----------------------------------------------------------------------------------- giving way

    def release_overdue_pages(self, pages: int, *, kept: bool = False) -> bool:
        """Gives up pages of branches whose pauses are too long, beginning with the branch that
        returns last. Returns False if there are no such branches.

        Args:
            kept: whether the source keeps pages and returns them quickly. Then all branches whose
                callers are away give up pages, but still go before new requests when they return.
        """
        now = self.now()
        while self._due and self._due[0][0] <= now:
            self._too_long.append(heapq.heappop(self._due)[2])
        self._too_long = [
            each
            for each in self._too_long
            if self._pauses.get(each.branch) is each and each.has_locked_pages
        ]
        away = self if kept else [each for each in self._too_long if each.due <= now]
        away = [each for each in away if each.has_locked_pages and each.branch.awaits_caller]
        enough = self.pages_given_up + pages
        for last in sorted(away, key=lambda each: -each.remaining_s(now)):
            if self.pages_given_up >= enough:
                break
            if kept and last.lock.node is not None:
                # the prefix will be reused: lets the source save it before it is evicted
                self._store.source.save_reused(last.lock.node)
            self._release_last_pages(last, enough - self.pages_given_up, for_good=not kept)
        return bool(away)

    def release_lowest_ranked_pages(
        self, pages: int, after: tuple[int, float] | None = None
    ) -> bool:
        """Gives up pages of the paused program that ranks last.

        Args:
            after: rank; only programs that rank after it give way. None for no limit.
        """
        for rank, _, pause in reversed(self._by_rank):
            if after is not None and rank <= after:
                return False
            if pause.has_locked_pages:
                return self._release_last_pages(pause, pages)
        return False

    def release_for_longest_waiter(self, pages: int, since: float) -> bool:
        """Gives up pages of the paused program that ranks last, for a request that has waited very
        long.

        Args:
            since: time at which the request began to wait.
        """
        if self.now() - since < max(_AGED_S, _AGED_WORTH * self._recompute_pool_s):
            return False
        last = next(
            (pause for _, _, pause in reversed(self._by_rank) if pause.has_locked_pages), None
        )
        return last is not None and self._release_last_pages(last, pages, for_good=True)

    def should_wait_idle(self, pages: int, *, beside: ScheduledBranch | None) -> bool:
        """Returns whether an idle device should wait for a paused program rather than recompute
        pages later.

        Args:
            pages: number of pages that the next request lacks.
            beside: branch of that request, whose program does not count.
        """
        own = None if beside is None else beside.program
        others = [each for each in self if each.has_locked_pages and each.branch.program is not own]
        if not others or not all(each.branch.awaits_caller for each in others):
            return False
        now = self.now()
        tokens = pages * self._store.page_size
        soonest = min(each.remaining_s(now) for each in others)
        if soonest < _SHORT_S and (
            soonest < _IDLE_WORTH * tokens * self.token_s or tokens > self._again
        ):
            return True
        self._again = max(self._again - tokens, 0.0)
        return False

    def release_last_returning_pages(self, pages: int, *, beside: ScheduledBranch | None) -> bool:
        """Gives up pages for a branch that needs them while nothing runs. They come from the
        lowest-ranked branch whose request waits. If there is none, they come from the branch that
        is expected back last. Returns False if no other branch has any pages.
        """
        others = [each for each in self if each.has_locked_pages and each.branch is not beside]
        if not others:
            return False
        if waiting := [each for each in others if not each.branch.awaits_caller]:
            return self._release_last_pages(max(waiting, key=lambda each: each.rank), pages)
        now = self.now()
        return self._release_last_pages(
            max(others, key=lambda each: each.remaining_s(now)), pages, for_good=True
        )

    def _release_last_pages(
        self, pause: PausedBranch, pages: int, *, for_good: bool = False
    ) -> bool:
        """Gives up the last pages of a pause's prefix. With `for_good`, the branch waits like a new
        one when it returns. Otherwise, it can still count on getting the pages back.
        """
        freed = pause.lock.unlock_last_pages(max(pages, self._store.pool.total // 64))
        self.pages_given_up += freed
        pause.branch.evicted = True
        if for_good and not pause.given_up:
            pause.given_up, pause.pages, pause.ahead = True, 0, ExpectedGrowth(pause.rank, 0, 0)
        elif not for_good:
            pause.pages += freed
        return True
