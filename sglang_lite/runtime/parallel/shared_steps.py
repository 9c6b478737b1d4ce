"""Steps that replicas compute together. Replicas have separate rows and attention, and share
feed-forwards.

Every step of one replica is a step of all. Steps are numbered: a replica that begins one sends the
others its number of rows and waits for theirs. A replica with nothing to compute joins with no rows
as soon as it is notified. So collectives match, and each replica knows where everyone's rows are.
If all can replay a captured graph, each uses the size needed by the one with the most rows, and
adds rows of padding.
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

# rank, step, rows and size; short enough for pipes not to interleave several writers
_MESSAGE = Struct("<iqii")
# delay before a failed step is reported, so that a replica whose end caused it is reported first
_REASON_S = 2.0


class SharedFeedForward:
    """Feed-forward that is divided among all ranks, for ranks with separate rows.

    Args:
        fed: this rank's part.
        ranks: collectives of the ranks, for tensors on their devices.
        steps: steps of all ranks. The feed-forward must be called within one of them.

    Attributes:
        steps: the argument.
    """

    def __init__(
        self, fed: Callable[[torch.Tensor], torch.Tensor], ranks: Collectives, steps: SharedSteps
    ) -> None:
        self._fed = fed
        self._ranks = ranks
        self.steps = steps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Computes the feed-forward for this rank's rows x [rows, columns], together with all other
        ranks. There must be as many rows as `steps.counts` has for this rank.
        """
        counts = self.steps.counts
        every = self._ranks.gather_columns(
            x.reshape(1, -1), [count * x.shape[1] for count in counts]
        ).view(-1, x.shape[1])
        return self._ranks.sum_and_scatter_rows(self._fed(every), counts)


class Steps:
    """Steps of a model without replicas. There is nothing to coordinate."""

    def enter_step(self, rows: int, size: int = 0) -> AbstractContextManager[int]:
        """Returns a context manager for a step. Its value is the size of the captured graph that
        computes the step, or 0 if none does.

        Args:
            rows: number of this rank's rows, which may be 0.
            size: number of rows of the smallest graph with which this rank can compute the step; 0
                if there is none.
        """
        return nullcontext(size)

    def set_all_row_counts(self, size: int) -> None:
        """Sets every rank's number of rows to `size`, for capturing a graph of that size."""

    def set_graph_replay(self, replay: Callable[[int], object], smallest: int) -> None:
        """Sets how this rank replays a graph in a step in which it has no rows.

        Args:
            replay: function that launches the graph of a given size.
            smallest: size of the smallest graph; 0 if there is none.
        """


UNSHARED = Steps()


class SharedSteps(Steps):
    """One rank's part in the steps of all replicas.

    Args:
        ranks: collectives of the replicas, each of which is a rank.
        inbox: pipe to which the others write.
        others: unbuffered pipes of the others.
        timeout_s: seconds that a step waits for the others.

    Attributes:
        ranks: the argument.
        counts: number of each rank's rows in the current step, including padding.
        wake: function called on another thread when one of the others has begun a step. Calls may
            be spurious.
        idle: function that computes this rank's part of a step in which it has no rows.
    """

    def __init__(
        self, ranks: Collectives, inbox: BinaryIO, others: Sequence[BinaryIO], timeout_s: float
    ) -> None:
        self.ranks = ranks
        self._inbox = inbox
        self._others = others
        self._timeout_s = timeout_s
        self.wake: Callable[[], object] = _do_nothing
        self.idle: Callable[[], object] = _do_nothing
        self._replay: Callable[[int], object] = _do_nothing
        self._smallest = 0
        self.counts: Sequence[int] = ()
        self._begun = 0  # steps that this rank has begun
        # Rows and sizes of the others by step and rank.
        self._told: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        self._changed = threading.Condition()  # guards `_told`
        threading.Thread(target=self._receive_counts, name="sglang_lite-steps", daemon=True).start()

    @property
    def is_awaited(self) -> bool:
        """True if another rank waits in a step that this one has not begun."""
        return self._begun + 1 in self._told

    def set_all_row_counts(self, size: int) -> None:
        self.counts = [size] * self.ranks.parallel.ranks

    def set_graph_replay(self, replay: Callable[[int], object], smallest: int) -> None:
        self._replay = replay
        self._smallest = smallest

    @contextmanager
    def enter_step(self, rows: int, size: int = 0) -> Iterator[int]:
        """Enters a step after all ranks have begun it, otherwise like `Steps.enter_step`. If all
        ranks can replay a graph, they replay graphs of the same size.

        Raises:
            BackendError: the step has failed, so the ranks are no longer in step.
        """
        try:
            self.counts, sizes = zip(*self._exchange_counts(rows, size))
            largest = max(sizes) if min(sizes) > 0 else 0
            if largest:
                self.set_all_row_counts(largest)
            yield largest
        except Exception as error:  # any error
            time.sleep(_REASON_S)
            own = self.ranks.parallel.rank
            every = self.ranks.parallel.ranks
            problem = (
                f"replica {own} of {every} failed in a step of all: {type(error).__name__}: {error}"
            )
            raise BackendError(problem) from error

    @torch.inference_mode()
    def join_step_without_rows(self) -> None:
        """Takes part in a step of other ranks, without rows."""
        with self.enter_step(0, self._smallest) as size:
            if size:
                self._replay(size)
            else:
                self.idle()

    def _exchange_counts(self, rows: int, size: int) -> list[tuple[int, int]]:
        """Sends this rank's number of rows and graph size, and waits until all ranks have begun the
        next step. Returns the number of rows and the graph size of every rank.
        """
        own = self.ranks.parallel.rank
        step = self._begun + 1
        for pipe in self._others:
            pipe.write(_MESSAGE.pack(own, step, rows, size))
        with self._changed:
            if not self._changed.wait_for(
                lambda: len(self._told[step]) == len(self._others), self._timeout_s
            ):
                missing = min({*range(self.ranks.parallel.ranks)} - {own, *self._told[step]})
                raise BackendError(
                    f"replica {missing} did not begin it within {self._timeout_s:g} s (dist_timeout)"
                )
            told = {**self._told.pop(step), own: (rows, size)}
            self._begun = step
        return [told[rank] for rank in range(len(told))]

    def _receive_counts(self) -> None:
        """Receives the other ranks' numbers of rows until the pipe is closed."""
        while message := self._inbox.read(_MESSAGE.size):
            rank, step, rows, size = _MESSAGE.unpack(message)
            with self._changed:
                self._told[step][rank] = rows, size
                self._changed.notify()
            self.wake()


def _do_nothing(*_: object) -> None:
    """Stands in for functions that are not set yet."""
