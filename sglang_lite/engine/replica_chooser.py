"""Chooses a replica for each request and program: the replica whose cache has the prompt's prefix,
or else the replica with the least left to compute.

Replicas are identified by number, and prompts by digests of their prefixes. Nothing here depends on
processes or messages. A replica's cache is assumed to contain the prefixes that its radix tree
reports, and the prompts of requests that were sent to the replica and have not ended.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sglang_lite.runtime.capacity import Capacity
from sglang_lite.runtime.config import LoadBalance

# A prompt is sent to the replica that has its prefix in its cache if the prefix is at least this
# share of the prompt. A smaller prefix, like the start of a chat template, would only gather
# unrelated prompts at one replica.
FOLLOWED: Final = 0.3
# A replica is overloaded while it has at least this many rows more than the least busy replica, and
# more than this many times that replica's rows. SGLang's gateway has the same rule and defaults.
AHEAD_ROWS: Final = 64
AHEAD_TIMES: Final = 1.5


@dataclass(eq=False, slots=True)
class Placement:
    """A request or program that was placed on a replica.

    Attributes:
        rank: number of the replica.
        digests: digests of its prompt's prefixes.
        rows: maximum number of its rows in the replica's steps.
        tokens: expected number of tokens still to be computed.
        over: True once it has ended and no longer counts.
    """

    rank: int
    digests: Sequence[int]
    rows: int = 0
    tokens: int = 0
    over: bool = False


@dataclass(eq=False, slots=True)
class _Replica:
    rows: int = 0
    tokens: int = 0
    cached: int = 0  # digests that its tree has
    coming: Counter[int] = field(default_factory=Counter)  # digests of the prompts placed here


class ReplicaChooser:
    """Chooses replicas. All methods may be called on any thread.

    Args:
        count: number of replicas.
        rule: rule for choosing, a value of EngineConfig's `load_balance_method`.
        capacity: capacity of each replica.
        every: number of tokens between two digests of a prompt.
        readiness: function that takes a replica's number and returns how ready the replica is for
            requests. Only replicas with the highest readiness are chosen.
    """

    def __init__(
        self,
        count: int,
        rule: LoadBalance,
        capacity: Capacity,
        every: int,
        readiness: Callable[[int], int],
    ) -> None:
        self._rule = rule
        self._capacity = capacity
        self._every = every
        self._readiness = readiness
        self._replicas = [_Replica() for _ in range(count)]
        # For each digest, the replicas (as bits) whose trees have it, or that were sent a prompt
        # with it.
        self._trees: dict[int, int] = {}
        self._coming: dict[int, int] = {}
        self._turn = 0
        self._lock = threading.Lock()

    def place_prompt(
        self,
        digests: Sequence[int],
        length: int,
        expected: int,
        *,
        rows: int = 1,
        rank: int | None = None,
    ) -> Placement:
        """Chooses a replica and counts the request or program there until it has ended
        (`forget_placement`).

        Args:
            digests: digests of the prompt's prefixes, shortest first.
            length: number of tokens of the prompt.
            expected: expected number of tokens to be generated.
            rows: number of samples.
            rank: replica to use; None for the best.
        """
        with self._lock:
            known = self._count_leading_digests(digests)
            if rank is None:
                rank = self._choose_best(known, length, rows)
            tokens = max(length - known[rank] * self._every, 0) + expected
            placement = Placement(rank, digests)
            self._replicas[rank].coming.update(digests)
            for digest in digests:
                self._coming[digest] = self._coming.get(digest, 0) | 1 << rank
            self._adjust_counts(placement, rows, tokens)
            return placement

    def adjust(self, placement: Placement, rows: int, tokens: int) -> None:
        """Adds rows and tokens to a placement; negative numbers subtract."""
        with self._lock:
            self._adjust_counts(placement, rows, tokens)

    def forget_placement(self, placement: Placement) -> None:
        """Forgets a placement that has ended. After that, only the prefixes in the replica's radix
        tree are still known to be there.
        """
        with self._lock:
            self._adjust_counts(placement, -placement.rows, -placement.tokens)
            bit = 1 << placement.rank
            coming = self._replicas[placement.rank].coming
            coming.subtract(placement.digests)
            for digest in placement.digests:
                if not coming[digest]:
                    del coming[digest]
                    _remove_from_set(self._coming, digest, bit)
            placement.digests = ()
            placement.over = True

    def find_holder(self, digests: Sequence[int]) -> int:
        """Returns the number of the replica that has the longest prefix of a prompt in its cache."""
        with self._lock:
            known = self._count_leading_digests(digests)
        return known.index(max(known))

    def update_tree(
        self, rank: int, gained: Iterable[int], lost: Iterable[int], *, forgotten: bool = False
    ) -> None:
        """Records what a replica's tree has gained and lost.

        Args:
            forgotten: whether the tree has lost everything that it had before.
        """
        bit = 1 << rank
        replica = self._replicas[rank]
        with self._lock:
            if forgotten:
                lost = [digest for digest, ranks in self._trees.items() if ranks & bit]
            for digest in lost:
                replica.cached -= self._trees.get(digest, 0) >> rank & 1
                _remove_from_set(self._trees, digest, bit)
            for digest in gained:
                ranks = self._trees.get(digest, 0)
                replica.cached += not ranks & bit
                self._trees[digest] = ranks | bit

    def _adjust_counts(self, placement: Placement, rows: int, tokens: int) -> None:
        if placement.over:
            return
        replica = self._replicas[placement.rank]
        placement.rows = placement.rows + rows
        placement.tokens = placement.tokens + tokens
        replica.rows = replica.rows + rows
        replica.tokens = replica.tokens + tokens

    def _count_leading_digests(self, digests: Sequence[int]) -> list[int]:
        """Returns a list with one count per replica: how many of a prompt's first digests the
        replica has in its cache, or is about to have.
        """
        known = [len(digests)] * len(self._replicas)
        there = (1 << len(known)) - 1
        for number, digest in enumerate(digests):
            here = there & (self._trees.get(digest, 0) | self._coming.get(digest, 0))
            if here != there:
                known = [
                    number if (there & ~here) >> rank & 1 else each
                    for rank, each in enumerate(known)
                ]
                there = here
            if not there:
                break
        return known

    def _choose_best(self, known: Sequence[int], length: int, rows: int) -> int:
        every = range(len(self._replicas))
        readiness = [self._readiness(rank) for rank in every]
        ranks = [rank for rank in every if readiness[rank] == max(readiness)]
        if self._rule == "round_robin":
            chosen = min(ranks, key=lambda rank: (rank - self._turn) % len(every))
            self._turn = chosen + 1
            return chosen
        if self._rule in ("total_requests", "shortest_queue"):
            return min(
                ranks, key=lambda rank: (self._replicas[rank].rows, self._load_sort_key(rank))
            )
        if self._rule == "total_tokens":
            return min(ranks, key=self._load_sort_key)
        fewest = min(self._replicas[rank].rows for rank in ranks)
        # the emptiest never is
        ranks = [rank for rank in ranks if not self._is_overloaded(rank, fewest)]
        ranks = [rank for rank in ranks if self._has_room(rank, rows)] or ranks
        longest = max(known[rank] for rank in ranks)
        if longest * self._every < FOLLOWED * length:
            return min(ranks, key=self._load_sort_key)
        return min((rank for rank in ranks if known[rank] == longest), key=self._load_sort_key)

    def _load_sort_key(self, rank: int) -> tuple[int, int, int]:
        """Returns a key that sorts replicas by load. It compares the tokens left to compute, then
        the number of cached digests, then the replica's number.
        """
        return self._replicas[rank].tokens, self._replicas[rank].cached, rank

    def _is_overloaded(self, rank: int, fewest: int) -> bool:
        """Returns True if a replica has far more rows than the least busy one, so that new rows
        should go elsewhere.
        """
        rows = self._replicas[rank].rows
        return rows - fewest >= AHEAD_ROWS and rows > AHEAD_TIMES * fewest

    def _has_room(self, rank: int, rows: int) -> bool:
        """Returns True if a replica can start more rows immediately, without waiting for others to
        end.
        """
        replica = self._replicas[rank]
        capacity = self._capacity
        return (
            replica.rows + rows <= capacity.sizes.max_running and replica.tokens <= capacity.tokens
        )


def _remove_from_set(sets: dict[int, int], digest: int, bit: int) -> None:
    """Removes a replica from the set of replicas that have a digest. The set is an integer with one
    bit per replica.
    """
    if left := sets.get(digest, 0) & ~bit:
        sets[digest] = left
    else:
        sets.pop(digest, None)
