"""Resources of running requests besides a slot and pages, such as an adapter on the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from sglang_lite.runtime.requests.request import Request


class ChunkCut(Protocol):
    """Rule about where a chunk of a prompt may end."""

    def __call__(self, request: Request, start: int, end: int, *, first: bool) -> int:
        """Returns the end of a chunk that the step has room for.

        Args:
            request: request whose prompt is computed.
            start, end: positions start … end-1 would be computed.
            first: whether it is the step's first chunk.

        Returns:
            `end`, or an earlier position; `start` to compute nothing in this step. Only a first
            chunk may get a later position than `end`.
        """
        ...


class Resource:
    """Something that a scheduler reserves for requests while they run.

    A subclass overrides the methods that concern it. All of them are called on the loop's thread.
    """

    def order_candidates(self, candidates: Iterable[Request]) -> Iterable[Request]:
        """Begins an admission. Drops reservations of requests that did not start, and yields all
        candidates in the order in which to admit them.
        """
        return candidates

    def may_start(self, request: Request) -> bool:
        """Reserves what a waiting request needs, until the next admission. Returns False if the request
        has to wait. Other requests may still start.
        """
        return True

    def count_usable_cached(self, request: Request, cached: int) -> int:
        """Returns how many of a prompt's first `cached` tokens may be read from the cache."""
        return cached

    def record_start(self, request: Request) -> None:
        """Commits the reservation of a request that now has a slot, and fills the slot's columns.
        Also called for a request that continues in the slot of another one.
        """

    def cut_chunk(self, request: Request, start: int, end: int, *, first: bool) -> int:
        """Returns where a chunk of a prompt ends; see `ChunkCut`."""
        return end

    def release_unused(self) -> None:
        """Frees what no request needs any more. Called after a request has ended, unless the next
        one takes its slot.
        """

    def close(self) -> None:
        """Notifies all who wait for the resource, because the engine is closing."""
