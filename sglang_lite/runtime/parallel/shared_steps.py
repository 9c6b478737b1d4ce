"""Steps that replicas compute together, which have rows and attention of their own and share feed-forwards.

Every step of a replica is a step of all. Steps are numbered: a replica that begins one tells the others how many rows
it has, and waits for their numbers; one that has nothing to compute joins with none as soon as it is told. So
collectives meet, and each replica knows whose rows are where. If all can replay a captured graph, each takes the
size that the one with most rows needs, and fills it with rows of padding.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from struct import Struct
from typing import BinaryIO

import torch

from sglang_lite.protocol import BackendError
from sglang_lite.runtime.parallel.collectives import Collectives

_MESSAGE = Struct("<iqii")  # rank, step, rows and size; so short that pipes don't mix those of several writers
_REASON_S = 2.0  # from a step that fails until it is told, in which the replica is named whose end is the cause


class SharedFeedForward:
    """Feed-forward of which each rank has a part, for ranks with rows of their own.

    Args:
        fed: this rank's part.
        ranks: collectives of the ranks, for tensors on their devices.
        steps: steps of all, in one of which it is called.

    Attributes:
        steps: the argument.
    """

    def __init__(self, fed: Callable[[torch.Tensor], torch.Tensor], ranks: Collectives, steps: SharedSteps) -> None:
        self._fed, self._ranks, self.steps = fed, ranks, steps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what all ranks' parts give for this rank's rows x [rows, columns], as many as the step has."""
        counts = self.steps.counts
        every = self._ranks.gather(x.reshape(1, -1), [count * x.shape[1] for count in counts]).view(-1, x.shape[1])
        return self._ranks.sum_own(self._fed(every), counts)


class Steps:
    """Steps of a model that shares none."""

    def begin(self, rows: int, size: int = 0) -> AbstractContextManager[int]:
        """Context of a step: the size of the captured graph that computes it, 0 for none.

        Args:
            rows: number of this rank's rows, perhaps 0.
            size: rows of the smallest graph by which this rank can compute the step; 0 if there is none.
        """
        return nullcontext(size)

    def pad(self, size: int) -> None:
        """Says that each rank has `size` rows, as in a graph of that size that is being captured."""

    def replay_by(self, replay: Callable[[int], object], smallest: int) -> None:
        """Says how this rank takes part in a step by a graph if it has no rows.

        Args:
            replay: function that launches the graph of a size.
            smallest: size of the smallest graph; 0 if there is none.
        """


UNSHARED = Steps()


class SharedSteps(Steps):
    """One rank's part in the steps of all.

    Args:
        ranks: collectives of the replicas, each of which is a rank.
        inbox: pipe that the others write to.
        others: their pipes, not buffered.
        timeout_s: seconds that a step waits for the others.

    Attributes:
        ranks: the argument.
        counts: number of each rank's rows in the step that runs, with padding.
        wake: function called on another thread when one of the others has begun a step; it may be called in vain.
        idle: function that computes this rank's part of a step in which it has no rows.
    """

    def __init__(self, ranks: Collectives, inbox: BinaryIO, others: Sequence[BinaryIO], timeout_s: float) -> None:
        self.ranks, self._inbox, self._others, self._timeout_s = ranks, inbox, others, timeout_s
        self.wake: Callable[[], object] = _nothing
        self.idle: Callable[[], object] = _nothing
        self._replay: Callable[[int], object] = _nothing
        self._smallest = 0
        self.counts: Sequence[int] = ()
        self._begun = 0  # steps that this rank has begun
        # Rows and sizes of the others by step and rank.
        self._told: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        self._changed = threading.Condition()  # guards `_told`
        threading.Thread(target=self._read, name="sglang_lite-steps", daemon=True).start()

    @property
    def due(self) -> bool:
        """True if another rank waits in a step that this one has not begun."""
        return self._begun + 1 in self._told

    def pad(self, size: int) -> None:
        self.counts = [size] * self.ranks.parallel.ranks

    def replay_by(self, replay: Callable[[int], object], smallest: int) -> None:
        self._replay, self._smallest = replay, smallest

    @contextmanager
    def begin(self, rows: int, size: int = 0) -> Iterator[int]:
        """Context as of `Steps`, entered when all ranks have begun the step. All replay graphs of one size.

        Raises:
            BackendError: the step has failed: the ranks are not in the same place any more.
        """
        try:
            self.counts, sizes = zip(*self._tell(rows, size))
            largest = max(sizes) if min(sizes) > 0 else 0
            if largest:
                self.pad(largest)
            yield largest
        except Exception as error:  # of any kind
            time.sleep(_REASON_S)
            own, every = self.ranks.parallel.rank, self.ranks.parallel.ranks
            problem = f"replica {own} of {every} failed in a step of all: {type(error).__name__}: {error}"
            raise BackendError(problem) from error

    @torch.inference_mode()
    def join(self) -> None:
        """Takes part in a step of others, without rows."""
        with self.begin(0, self._smallest) as size:
            if size:
                self._replay(size)
            else:
                self.idle()

    def _tell(self, rows: int, size: int) -> list[tuple[int, int]]:
        """Rows and sizes of all ranks, which have begun the next step."""
        own, step = self.ranks.parallel.rank, self._begun + 1
        for pipe in self._others:
            pipe.write(_MESSAGE.pack(own, step, rows, size))
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._told[step]) == len(self._others), self._timeout_s):
                missing = min({*range(self.ranks.parallel.ranks)} - {own, *self._told[step]})
                raise BackendError(f"replica {missing} did not begin it within {self._timeout_s:g} s (dist_timeout)")
            told = {**self._told.pop(step), own: (rows, size)}
            self._begun = step
        return [told[rank] for rank in range(len(told))]

    def _read(self) -> None:
        """Takes in what the others tell, until all have ended."""
        while message := self._inbox.read(_MESSAGE.size):
            rank, step, rows, size = _MESSAGE.unpack(message)
            with self._changed:
                self._told[step][rank] = rows, size
                self._changed.notify()
            self.wake()


def _nothing(*_: object) -> None:
    """Stands in for functions that are not known yet."""
