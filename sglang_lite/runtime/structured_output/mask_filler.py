"""Provides the token masks of all rows in a step's batch. Masks that are already known are copied,
and threads compute the others. A step need not wait for all of them.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from sglang_lite.runtime.structured_output.base import Mask, Matcher

logger = logging.getLogger("sglang_lite")


class MaskFiller:
    """Provides the masks of a step's rows. Must be used from one thread, except for `interrupt`.

    Args:
        threads: number of threads that compute masks concurrently.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "sglang_lite-masks")
        # None is an interruption
        self._results: queue.SimpleQueue[_MaskBatch | None] = queue.SimpleQueue()
        self._waiting = False  # True while `fill` waits for a mask without a deadline
        # Keys of matchers whose masks are being computed. Meanwhile these matchers must not be
        # moved, even if their mask becomes known in another way.
        self._locked: set[Hashable] = set()
        self._pending: dict[Hashable, Matcher] = {}

    def fill(
        self,
        matchers: Sequence[Matcher],
        put: Callable[[int, Mask], object],
        *,
        patience: float | None = None,
        has_unmasked_rows: bool = False,
        has_other_work: Callable[[], bool] = lambda: False,
    ) -> list[int]:
        """Passes each matcher's mask to `put` once it is known.

        If a matcher's engine fails, its mask allows no token, which ends only that request.

        Args:
            matchers: matchers of the rows.
            put: function that takes the index of a matcher, and its mask.
            patience: seconds after which unfinished rows are late, provided that another row can
                continue; None for no limit. If no row can continue, the first mask is awaited,
                unless `has_other_work` returns True.
            has_unmasked_rows: whether the step has rows without a mask, which can continue.
            has_other_work: returns True if the thread has other work; `interrupt` signals a change
                to True.

        Returns:
            Indices of late rows, whose masks were not put. Their matchers must not move until a
                later call has put the masks.
        """
        end = None if patience is None else time.perf_counter() + patience
        while not self._results.empty():
            self._store_batch(self._results.get())
        remaining = self._put_known_masks(matchers, put, range(len(matchers)))
        alone = len(matchers) == 1 and not has_unmasked_rows and not self._locked
        if remaining and alone:  # no other row waits, so a separate thread does not pay
            for part in matchers[0].parts:
                if part.cached_mask() is None:
                    self._store_batch(_compute_mask_batch([part]))
            remaining = self._put_known_masks(matchers, put, remaining)
        can_continue = has_unmasked_rows or len(remaining) < len(matchers)
        # repeated if a computed mask does not hold for all matchers in its state, or was evicted
        while remaining:
            missing = {
                part.state_key: part
                for row in remaining
                for part in matchers[row].parts
                if self._is_pending(part) or part.cached_mask() is None
            }
            while missing:
                self._submit_parts(missing.values())
                batch = (
                    self._wait_for_masks_until(end)
                    if can_continue
                    else self._wait_for_first(has_other_work)
                )
                if batch is None:
                    return self._put_known_masks(matchers, put, remaining)
                can_continue = True
                for state in self._store_batch(batch):
                    missing.pop(state, None)
            remaining = self._put_known_masks(matchers, put, remaining)
        return remaining

    def interrupt(self) -> None:
        """Makes `fill` stop waiting for the first mask. Can be called on any thread; takes no lock."""
        if self._waiting:
            self._results.put(None)

    def close(self) -> None:
        """Shuts the threads down without waiting. Masks in progress are finished and discarded."""
        self._pool.shutdown(wait=False)

    def _submit_parts(self, parts: Iterable[Matcher]) -> None:
        """Submits mask computations for matchers whose lock is free, unless the mask of their state
        is already being computed.
        """
        by_engine: dict[int, dict[Hashable, list[Matcher]]] = {}  # then by lock key
        for part in parts:
            if part.lock_key not in self._locked and part.state_key not in self._pending:
                by_engine.setdefault(id(part.engine), {}).setdefault(part.lock_key, []).append(part)
        for by_lock in by_engine.values():
            self._locked.update(by_lock)
            self._pending.update(
                {part.state_key: part for group in by_lock.values() for part in group}
            )
            groups = list(by_lock.values())
            count = min(len(groups), 2 * self._threads)
            for i in range(count):
                self._pool.submit(
                    self._compute_and_report, [part for group in groups[i::count] for part in group]
                )

    def _compute_and_report(self, parts: list[Matcher]) -> None:
        self._results.put(_compute_mask_batch(parts))

    def _wait_for_masks_until(self, end: float | None) -> _MaskBatch | None:
        """Waits for the next masks until `end`, ignoring stale interruptions. Returns None if no
        masks come in time.
        """
        batch: _MaskBatch | None = None
        with contextlib.suppress(queue.Empty):
            while batch is None:
                batch = self._results.get(
                    timeout=None if end is None else max(end - time.perf_counter(), 0)
                )
        return batch

    def _wait_for_first(self, has_other_work: Callable[[], bool]) -> _MaskBatch | None:
        """Waits for the next masks. Returns None if the thread has other work first."""
        self._waiting = True  # set before `has_other_work` is called: later work calls `interrupt`
        try:
            return None if has_other_work() else self._results.get()
        finally:
            self._waiting = False

    def _store_batch(self, batch: _MaskBatch | None) -> list[Hashable]:
        """Stores computed masks in their matchers. Returns the state keys that they were computed
        for.

        The keys are read before `set_mask`, after which a failed matcher has its own state.
        """
        if batch is None:  # stale interruption
            return []
        states = [part.state_key for part in batch.parts]
        for state, part, mask in zip(states, batch.parts, batch.masks):
            self._locked.discard(part.lock_key)
            self._pending.pop(state, None)
            part.set_mask(mask)
        return states

    def _is_pending(self, part: Matcher) -> bool:
        return self._pending.get(part.state_key) is part

    def _put_known_masks(
        self, matchers: Sequence[Matcher], put: Callable[[int, Mask], object], rows: Iterable[int]
    ) -> list[int]:
        """Puts the masks that are known. Returns the rows whose masks are missing or still being
        computed.
        """
        remaining: list[int] = []
        for row in rows:
            matcher = matchers[row]
            pending = bool(self._pending) and any(map(self._is_pending, matcher.parts))
            mask = None if pending else matcher.cached_mask()
            if mask is None:
                remaining.append(row)
            else:
                put(row, mask)
        return remaining


@dataclass(frozen=True, slots=True)
class _MaskBatch:
    """Masks computed for matchers of one engine."""

    parts: Sequence[Matcher]
    masks: Sequence[Mask]


def _compute_mask_batch(parts: Sequence[Matcher]) -> _MaskBatch:
    engine = parts[0].engine
    try:
        return _MaskBatch(parts, list(engine.masks(parts)))
    except Exception:  # from a library, which does not report the matcher that caused it
        logger.exception("%s failed to make masks", engine.name)
        return _MaskBatch(parts, [_compute_single_mask(part) for part in parts])


def _compute_single_mask(part: Matcher) -> Mask:
    try:
        mask: Mask = part.engine.masks([part])[0]
        return mask
    except Exception:  # caused by this matcher
        return np.zeros((part.engine.vocab_size + 31) // 32, np.int32)
