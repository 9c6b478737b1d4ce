"""Masks of a step's rows: known masks are copied, others are computed by threads. A step need not wait for all."""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.structured_output.base import Mask, Matcher

logger = logging.getLogger("sglang_lite")


class MaskFiller:
    """Fills the masks of a step's rows. Must be used on one thread, apart from `interrupt`.

    Args:
        threads: number of threads that compute masks concurrently.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "sglang_lite-masks")
        self._made: queue.SimpleQueue[_Made | None] = queue.SimpleQueue()  # None is an interruption
        self._waiting = False  # True while `fill` waits for a mask without a deadline
        # Keys of matchers whose masks are being computed. Until then these matchers must not be moved, even if their
        # mask becomes known in another way.
        self._lines: set[Hashable] = set()
        self._places: dict[Hashable, Matcher] = {}

    def fill(
        self,
        matchers: Sequence[Matcher],
        masks: NDArray[np.int32],
        *,
        patience: float | None = None,
        others: bool = False,
        wanted: Callable[[], bool] = lambda: False,
    ) -> list[int]:
        """Fills row i of `masks` for the i-th matcher.

        If a matcher's engine fails, its mask allows no token, which ends that request alone.

        Args:
            matchers: matchers of the rows.
            masks: masks to fill, [N, words].
            patience: seconds after which unfinished rows are late, provided that another row can continue; None for no
                limit. If no row can continue, the first mask is awaited, unless `wanted` returns True.
            others: whether the step has rows without a mask, which can continue.
            wanted: returns True if the thread has other work; `interrupt` signals a change to True.

        Returns:
            Indices of late rows. They are not filled; until the caller has asked for them again, their matchers must
                not move.
        """
        end = None if patience is None else time.perf_counter() + patience
        while not self._made.empty():
            self._take(self._made.get())
        left = self._copied(matchers, masks, range(len(matchers)))
        alone = len(matchers) == 1 and not others and not self._lines
        if left and alone:  # no other row waits, so another thread is not worth it
            for part in matchers[0].parts:
                if part.known() is None:
                    self._take(_make([part]))
            left = self._copied(matchers, masks, left)
        goes_on = others or len(left) < len(matchers)
        while left:  # repeated if a computed mask does not hold for all matchers in its place, or was evicted
            missing = {part.place: part for row in left for part in matchers[row].parts if self._waits(part)}
            while missing:
                self._start(missing.values())
                made = self._next(end) if goes_on else self._first(wanted)
                if made is None:
                    return self._copied(matchers, masks, left)
                goes_on = True
                for place in self._take(made):
                    missing.pop(place, None)
            left = self._copied(matchers, masks, left)
        return left

    def interrupt(self) -> None:
        """Makes `fill` stop waiting for the first mask. Callable on any thread; takes no lock."""
        if self._waiting:
            self._made.put(None)

    def close(self) -> None:
        """Shuts the threads down without waiting; masks in progress are finished and discarded."""
        self._pool.shutdown(wait=False)

    def _start(self, parts: Iterable[Matcher]) -> None:
        """Submits the computation of masks for all parts whose line and place are free."""
        lines: dict[int, dict[Hashable, list[Matcher]]] = {}  # by engine, then by line
        for part in parts:
            if part.line not in self._lines and part.place not in self._places:
                lines.setdefault(id(part.engine), {}).setdefault(part.line, []).append(part)
        for by_line in lines.values():
            self._lines.update(by_line)
            self._places.update({part.place: part for line in by_line.values() for part in line})
            each = list(by_line.values())
            count = min(len(each), 2 * self._threads)
            for i in range(count):
                self._pool.submit(self._run, [part for line in each[i::count] for part in line])

    def _run(self, parts: list[Matcher]) -> None:
        self._made.put(_make(parts))

    def _next(self, end: float | None) -> _Made | None:
        """Waits for the next masks until `end`, skipping late interruptions; returns None if no masks come in time."""
        made: _Made | None = None
        with contextlib.suppress(queue.Empty):
            while made is None:
                made = self._made.get(timeout=None if end is None else max(end - time.perf_counter(), 0))
        return made

    def _first(self, wanted: Callable[[], bool]) -> _Made | None:
        """Waits for the next masks; returns None if the thread is wanted first."""
        self._waiting = True  # set before `wanted` is called: later work calls `interrupt`
        try:
            return None if wanted() else self._made.get()
        finally:
            self._waiting = False

    def _take(self, made: _Made | None) -> list[Hashable]:
        """Stores computed masks in their matchers; returns the places that they were computed for.

        The places are read before `learn`, as a failed matcher has a place of its own afterwards.
        """
        if made is None:  # late interruption
            return []
        places = [part.place for part in made.parts]
        for place, part, mask in zip(places, made.parts, made.masks):
            self._lines.discard(part.line)
            self._places.pop(place, None)
            part.learn(mask)
        return places

    def _waits(self, part: Matcher) -> bool:
        return self._being_made(part) or part.known() is None

    def _being_made(self, part: Matcher) -> bool:
        return bool(self._places) and self._places.get(part.place) is part

    def _copied(self, matchers: Sequence[Matcher], masks: NDArray[np.int32], rows: Iterable[int]) -> list[int]:
        """Copies the masks that are known; returns the rows without one, or with one still being computed."""
        left: list[int] = []
        for row in rows:
            matcher = matchers[row]
            mask = None if any(map(self._being_made, matcher.parts)) else matcher.known()
            if mask is None:
                left.append(row)
            else:
                masks[row] = mask
        return left


@dataclass(frozen=True, slots=True)
class _Made:
    """Masks computed for matchers of one engine."""

    parts: Sequence[Matcher]
    masks: Sequence[Mask]


def _make(parts: Sequence[Matcher]) -> _Made:
    engine = parts[0].engine
    try:
        return _Made(parts, list(engine.masks(parts)))
    except Exception:  # from a library, which does not report the matcher that caused it
        logger.exception("%s failed to make masks", engine.name)
        return _Made(parts, [_made_alone(part) for part in parts])


def _made_alone(part: Matcher) -> Mask:
    try:
        mask: Mask = part.engine.masks([part])[0]
        return mask
    except Exception:  # caused by this matcher
        return np.zeros((part.engine.vocab_size + 31) // 32, np.int32)
