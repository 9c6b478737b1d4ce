"""The masks of a step's rows: those that are known are copied, the others are made by threads, and a step need not wait
for all of them."""

from __future__ import annotations

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
        self._made: queue.SimpleQueue[_Made] = queue.SimpleQueue()
        # Of what masks are being made. No matcher is moved meanwhile, even if its mask gets known in another way.
        self._lines: set[Hashable] = set()
        self._places: dict[Hashable, Matcher] = {}

    def fill(
        self,
        matchers: Sequence[Matcher],
        masks: NDArray[np.int32],
        *,
        patience: float = 0.0,
        can_wait: Callable[[int], bool] = lambda row: False,
        others: bool = False,
    ) -> list[int]:
        """Fills row i of `masks` for the i-th matcher. A matcher whose engine fails is left without a token that may
        come next, which ends its request alone.

        Args:
            masks: [N, words].
            patience: seconds after which rows that can wait are late, if any row continues meanwhile.
            can_wait: whether a row can.
            others: rows that need none continue.

        Returns:
            The rows that are late: not filled, to be asked for again. Until then their matchers must not be moved.
        """
        end = time.perf_counter() + patience
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
            wanted = {part.place: part for row in left for part in matchers[row].parts if self._waits(part)}
            needed = {part.place for row in left if not can_wait(row) for part in matchers[row].parts} & wanted.keys()
            while wanted:
                self._start(wanted.values())
                try:
                    made = self._made.get(timeout=max(end - time.perf_counter(), 0) if goes_on and not needed else None)
                except queue.Empty:
                    return self._copied(matchers, masks, left)
                goes_on = True
                for place in self._take(made):
                    wanted.pop(place, None)
                    needed.discard(place)
            left = self._copied(matchers, masks, left)
        return left

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

    def _take(self, made: _Made) -> list[Hashable]:
        """Returns the places that the masks were made for; a matcher that fails is in one of its own from then on."""
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
