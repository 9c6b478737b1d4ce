"""The masks of a step's rows: those that are known are copied, the others are made by threads, and a step need not wait
for all of them."""

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
    """To be used on one thread.

    Args:
        threads: that make masks at a time.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "sglang_lite-masks")
        self._made: queue.SimpleQueue[_Made | None] = queue.SimpleQueue()  # None: somebody wants the thread
        self._waiting = False  # for a mask, however long that takes
        # Of what masks are being made. No matcher is moved meanwhile, even if its mask gets known in another way.
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
        """Fills row i of `masks` for the i-th matcher. A matcher whose engine fails is left without a token that may
        come next, which ends its request alone.

        Args:
            masks: [N, words].
            patience: seconds after which rows are late, if any row continues meanwhile; None for as long as it takes.
                If none continues the first mask is waited for, unless the thread is wanted for something else.
            others: rows that need none continue.
            wanted: tells whether it is; `interrupt` says that it is from now on.

        Returns:
            The rows that are late: not filled, to be asked for again. Until then their matchers must not be moved.
        """
        end = None if patience is None else time.perf_counter() + patience
        while not self._made.empty():
            self._take(self._made.get())
        left = self._copied(matchers, masks, range(len(matchers)))
        alone = len(matchers) == 1 and not others and not self._lines
        if left and alone:  # nobody waits for it: not worth another thread
            for part in matchers[0].parts:
                if part.known() is None:
                    self._take(_make([part]))
            left = self._copied(matchers, masks, left)
        goes_on = others or len(left) < len(matchers)
        while left:  # again where a mask that was made is not for all in its place, or was dropped
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
        """Has `fill` not wait for the first mask any longer. On any thread; takes no lock."""
        if self._waiting:
            self._made.put(None)

    def close(self) -> None:
        """Masks that are being made are finished, and thrown away."""
        self._pool.shutdown(wait=False)

    def _start(self, parts: Iterable[Matcher]) -> None:
        """Has masks made, where that can be done now."""
        lines: dict[int, dict[Hashable, list[Matcher]]] = {}  # by engine
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
        """The masks that are made next; None: they are not in time. Passes over interruptions that came too late."""
        made: _Made | None = None
        with contextlib.suppress(queue.Empty):
            while made is None:
                made = self._made.get(timeout=None if end is None else max(end - time.perf_counter(), 0))
        return made

    def _first(self, wanted: Callable[[], bool]) -> _Made | None:
        """The masks that are made next; None: the thread is wanted before."""
        self._waiting = True  # before it asks: what comes after that interrupts
        try:
            return None if wanted() else self._made.get()
        finally:
            self._waiting = False

    def _take(self, made: _Made | None) -> list[Hashable]:
        """Returns the places that the masks were made for; a matcher that fails is in one of its own from then on."""
        if made is None:  # an interruption that came too late
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
        """Copies the masks that are known; returns the other rows, and those whose masks are still being made."""
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
    """Masks that were made for matchers of one engine."""

    parts: Sequence[Matcher]
    masks: Sequence[Mask]


def _make(parts: Sequence[Matcher]) -> _Made:
    engine = parts[0].engine
    try:
        return _Made(parts, list(engine.masks(parts)))
    except Exception:  # a library's; which of the matchers it was about is not said
        logger.exception("%s failed to make masks", engine.name)
        return _Made(parts, [_made_alone(part) for part in parts])


def _made_alone(part: Matcher) -> Mask:
    try:
        mask: Mask = part.engine.masks([part])[0]
        return mask
    except Exception:  # this one's
        return np.zeros((part.engine.vocab_size + 31) // 32, np.int32)
