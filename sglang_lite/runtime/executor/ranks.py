"""Ranks that share a model: rank 0 tells the others each step, and each computes its part of it.

Everything that a rank knows is in these messages. Ranks execute them in the same order, so their collectives meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.config import Capacity
from sglang_lite.runtime.executor.cpu_runner import CpuForward, CpuRunner
from sglang_lite.runtime.executor.logit_adjustments import DrawAdjustments
from sglang_lite.runtime.executor.model_runner import ModelRunner
from sglang_lite.runtime.executor.sampler import Masks, Sampled
from sglang_lite.runtime.executor.step_record import StepRecord, array_as_data, array_of_data
from sglang_lite.runtime.kernels.arena import Arena
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.models.model import Model
from sglang_lite.runtime.parallel.collectives import Collectives

_T = TypeVar("_T")


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Notice that all ranks have loaded their parts, with the size of the KV cache: the runner is made."""

    capacity: Capacity


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Forward of a step. No id is -1: only rank 0 knows the tokens that were drawn."""

    record: StepRecord


class Draw(msgspec.Struct, frozen=True, tag="draw"):
    """Logits of some rows of the last forward, as for `CpuRunner.logits`; rank 0 draws from them."""

    rows: Ints
    behind: Ints | None


RankMessage: TypeAlias = Begin | Forward | Draw
_encoder = msgspec.msgpack.Encoder(enc_hook=array_as_data)
_decoder = msgspec.msgpack.Decoder(RankMessage, dec_hook=array_of_data)


def read_message(content: bytes | memoryview) -> RankMessage:
    """Message of rank 0. Raises msgspec.MsgspecError if the content is none."""
    message: RankMessage = _decoder.decode(content)
    return message


class RankLinks(Protocol):
    """Rank 0's links to the other ranks.

    Attributes:
        collectives: rank 0's collectives with them.
    """

    @property
    def collectives(self) -> Collectives: ...

    def states(self) -> list[dict[str, int]]:
        """Rank and process id of every rank, for `Engine.stats`."""
        ...

    def wait_loaded(self) -> None:
        """Waits until the other ranks have loaded their parts of the model.

        Raises:
            SglError: one of them has failed.
        """
        ...

    def send(self, content: bytes) -> None:
        """Sends a message to all other ranks."""
        ...

    def fail(self, error: BaseException) -> NoReturn:
        """Ends all other ranks after an exception on rank 0, which may come of a rank that has ended.

        Raises:
            SglError: names the rank that failed first.
        """
        ...

    def close(self) -> None:
        """Ends the other ranks."""
        ...


class LeadRunner:
    """Runner of rank 0 on a CPU, a `ModelRunner`: tells each step to the other ranks before it computes its part.

    Args:
        runner: runner of this rank's part of the model.
        links: links to the other ranks.

    Attributes:
        links: as the argument.
    """

    cache_memory: Arena | None = None  # engines with ranks don't sleep

    def __init__(self, runner: CpuRunner, links: RankLinks) -> None:
        self._runner, self.links = runner, links
        self.allocate_masks = runner.allocate_masks

    @property
    def model(self) -> Model:
        return self._runner.model

    def forward(self, record: StepRecord) -> CpuForward:
        record = self._runner.with_drawn(record)
        return self._together(Forward(record), partial(self._runner.forward, record))

    def sample(
        self,
        forward: CpuForward,
        rows: NDArray[np.int64],
        adjustments: dict[int, DrawAdjustments],
        masks: Masks | None = None,
        scored: NDArray[np.bool_] | None = None,
        behind: Ints | None = None,
    ) -> Sampled:
        draw = partial(self._runner.sample, forward, rows, adjustments, masks, scored, behind)
        if not len(rows):
            return draw()
        return self._together(Draw(rows.astype(np.int32), None if behind is None else behind.astype(np.int32)), draw)

    def _together(self, message: RankMessage, compute: Callable[[], _T]) -> _T:
        try:
            self.links.send(_encoder.encode(message))
            return compute()
        except Exception as error:  # of any kind: the ranks are not in the same place any more
            self.links.fail(error)

    def page_memory(self, slots: int) -> NoReturn:
        raise AssertionError("pages of several ranks have no copies in the host's memory")

    def drop_graphs(self) -> None:
        """Does nothing: a CPU has no graphs."""

    def capture_graphs(self) -> None:
        """Does nothing: a CPU has no graphs."""

    def close(self) -> None:
        self.links.close()
        self._runner.close()


def begin(links: RankLinks, capacity: Capacity) -> None:
    """Makes the other ranks' runners, once they have loaded their parts. Raises as `RankLinks.wait_loaded`."""
    links.wait_loaded()
    links.send(_encoder.encode(Begin(capacity)))


def follow(messages: Iterable[RankMessage], make: Callable[[Capacity], ModelRunner]) -> None:
    """Computes a rank's part of what rank 0 tells, until no more messages come.

    Args:
        messages: messages of rank 0.
        make: makes the rank's runner.
    """
    runner: ModelRunner | None = None
    forward: Any = None  # of the runner
    for message in messages:
        match message:
            case Begin():
                runner = make(message.capacity)
            case Forward() if runner is not None:
                forward = runner.forward(message.record)
            case Draw() if isinstance(runner, CpuRunner):
                behind = None if message.behind is None else message.behind.copy()  # torch takes no array of a message
                runner.logits(forward, message.rows.astype(np.int64), behind)
