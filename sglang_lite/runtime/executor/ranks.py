"""Ranks that share a model: rank 0 sends each step to the others, and each rank computes its part.

Everything that a rank knows is in these messages. Ranks execute them in the same order, so their
collectives match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeAlias, TypeVar, cast

import msgspec
import numpy as np

from sglang_lite.protocol import RecordName, TokenArray
from sglang_lite.runtime.capacity import Capacity
from sglang_lite.runtime.executor.cpu_runner import CpuForward, CpuRunner
from sglang_lite.runtime.executor.expert_balance import ExpertBalance
from sglang_lite.runtime.executor.model_runner import ModelRunner
from sglang_lite.runtime.executor.sampler import Draws, Masks, SampledTokens
from sglang_lite.runtime.executor.step_record import StepRecord, array_from_data, array_to_data
from sglang_lite.runtime.kernels.arena import Arena
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.models.model import Model
from sglang_lite.runtime.parallel.collectives import Collectives

if TYPE_CHECKING:
    from sglang_lite.runtime.executor.gpu_draws import GpuPendingTokens
    from sglang_lite.runtime.executor.gpu_runner import GpuForward, GpuRunner
    from sglang_lite.runtime.executor.stages import Stages
    from sglang_lite.runtime.models.decoder import Decoder

_T = TypeVar("_T")
_Runner = TypeVar("_Runner", bound=ModelRunner)


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Message that all ranks have loaded their parts of the model. Ranks then create their runners,
    with a KV cache of the given size.
    """

    capacity: Capacity


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """Request to compute the forward of a step. On CPUs, rank 0 has already filled in the ids of
    drawn tokens, which only rank 0 knows.
    """

    record: StepRecord


class Draw(msgspec.Struct, frozen=True, tag="draw"):
    """Request for the logits of some rows of the last forward, as in `CpuRunner.logits`. Rank 0
    draws from them.
    """

    rows: Ints
    behind: Ints | None


class DrawParts(msgspec.Struct, frozen=True, tag="draw parts"):
    """Request to sample tokens on GPUs that each hold part of the vocabulary; see
    `GpuRunner.sample`.

    Attributes:
        step: number of the step.
        rows, behind: same as in `Draws`.
        adjusted: whether any row has adjustments, which only rank 0 knows.
        scored: whether the scores of any row are reported.
        words, mask_rows: words and rows of `Masks`, or None without masks.
    """

    step: int
    rows: Ints
    behind: Ints | None
    adjusted: bool
    scored: bool
    words: Ints | None
    mask_rows: Ints | None


class AllocateMasks(msgspec.Struct, frozen=True, tag="masks"):
    """Arguments of `GpuRunner.allocate_masks`."""

    rows: int
    words: int


class MoveExperts(msgspec.Struct, frozen=True, tag="experts"):
    """Arguments of `ExpertMoves.move`."""

    layer: int | None
    slots: tuple[int, ...]


RankMessage: TypeAlias = Begin | Forward | Draw | DrawParts | AllocateMasks | MoveExperts
_encoder = msgspec.msgpack.Encoder(enc_hook=array_to_data)
_decoder = msgspec.msgpack.Decoder(RankMessage, dec_hook=array_from_data)


def read_message(content: bytes | memoryview) -> RankMessage:
    """Decodes a message from rank 0. Raises msgspec.MsgspecError if the content is not a message."""
    message: RankMessage = _decoder.decode(content)
    return message


class RankLinks(Protocol):
    """Rank 0's links to the other ranks.

    Attributes:
        collectives: rank 0's collectives with the other ranks.
    """

    @property
    def collectives(self) -> Collectives: ...

    def states(self) -> list[dict[str, int]]:
        """Returns the rank and process id of every rank, for `Engine.stats`."""
        ...

    def wait_until_loaded(self) -> int:
        """Waits until the other ranks have loaded their parts of the model. Returns the number of
        bytes then in use, by any process, on the fullest of their GPUs. Returns 0 on CPUs.

        Raises:
            SglError: one of them has failed.
        """
        ...

    def send(self, content: bytes) -> None:
        """Sends a message to all other ranks."""
        ...

    def end_ranks_and_raise(self, error: BaseException) -> NoReturn:
        """Ends all other ranks after an exception on rank 0. The exception's cause may be a rank
        that ended.

        Raises:
            SglError: names the rank that failed first.
        """
        ...

    def close(self) -> None:
        """Ends the other ranks."""
        ...


class LeadRunner(Generic[_Runner]):
    """Runner of rank 0, a `ModelRunner`. Sends each step to the other ranks before it computes its
    own part.

    Args:
        runner: runner of this rank's part of the model.
        links: links to the other ranks.
        balance: rebalancing of experts between the ranks, or None.
    """

    cache_memory: Arena | None = None  # engines with ranks don't sleep, and keep their weights

    def __init__(self, runner: _Runner, links: RankLinks, balance: ExpertBalance | None) -> None:
        self._runner = runner
        self._links = links
        self._balance = balance

    @property
    def model(self) -> Model:
        return self._runner.model

    def stats(self) -> dict[str, Any]:  # numbers, and a list of them by rank
        """Returns counts for `Engine.stats`."""
        moved = {} if self._balance is None else {"expert_layers_moved": self._balance.moved}
        return {"ranks": self._links.states(), **moved}

    def compute_with_ranks(self, message: RankMessage, compute: Callable[[], _T]) -> _T:
        """Sends a message to the other ranks, computes rank 0's part while they compute theirs, and
        returns its result.
        """
        try:
            self._links.send(_encoder.encode(message))
            return compute()
        except Exception as error:  # any error, as the ranks are no longer in step
            self._links.end_ranks_and_raise(error)

    def forward_on_ranks(self, record: StepRecord, compute: Callable[[StepRecord], _T]) -> _T:
        """Runs a forward on all ranks, after any move of experts that is due."""
        if self._balance is not None and (move := self._balance.next_move()) is not None:
            self.compute_with_ranks(MoveExperts(*move), partial(move_experts, self.model, *move))
        return self.compute_with_ranks(Forward(record), partial(compute, record))

    def read_recorded_values(
        self, token_slots: Ints, names: Iterable[RecordName]
    ) -> dict[str, TokenArray]:
        """Returns the values that rank 0 has recorded. The other ranks' values are the same: all
        ranks choose the same experts and have complete hidden states.
        """
        return self._runner.read_recorded_values(token_slots, names)

    def allocate_page_memory(self, slots: int) -> NoReturn:
        raise AssertionError("pages of several ranks have no copies in the host's memory")

    def allocate_state_memory(self, slots: int) -> NoReturn:
        raise AssertionError("states of several ranks have no copies in the host's memory")

    def drop_graphs(self) -> None:
        """Does nothing, as an engine with several ranks never sleeps."""

    def capture_graphs(self) -> None:
        """Does nothing, as no graphs are ever dropped."""

    def close(self) -> None:
        self._links.close()
        self._runner.close()


class CpuLeadRunner(LeadRunner[CpuRunner]):
    """Runner of rank 0 on a CPU."""

    def forward(self, record: StepRecord) -> CpuForward:
        return self.forward_on_ranks(self._runner.with_drawn_ids(record), self._runner.forward)

    def sample(self, forward: CpuForward, draws: Draws) -> SampledTokens:
        draw = partial(self._runner.sample, forward, draws)
        if not len(draws.rows):
            return draw()
        return self.compute_with_ranks(
            Draw(draws.rows.astype(np.int32), _int32_or_none(draws.behind)), draw
        )

    def allocate_masks(self, rows: int, words: int) -> Ints:
        return self._runner.allocate_masks(rows, words)


class GpuLeadRunner(LeadRunner["GpuRunner"]):
    """Runner of rank 0 on a GPU. All GPUs have the drawn tokens, so ids of -1, which stand for
    these, are sent unchanged.
    """

    def __init__(self, runner: GpuRunner, links: RankLinks, balance: ExpertBalance | None) -> None:
        super().__init__(runner, links, balance)
        self._stages = _make_stages(runner)

    def forward(self, record: StepRecord) -> GpuForward:
        forward = self.forward_on_ranks(record, self._stages.begin_step)
        assert forward is not None, "rank 0 is of the first stage"
        return forward

    def sample(self, forward: GpuForward, draws: Draws) -> GpuPendingTokens | SampledTokens:
        masks = draws.masks
        step = forward.record.step

        def draw() -> GpuPendingTokens | SampledTokens:
            return self._runner.sample(self._stages.finish_step(step), draws)

        if not len(draws.rows) and not forward.record.scores:
            return self._runner.sample(forward, draws)
        message = DrawParts(
            step,
            draws.rows.astype(np.int32),
            _int32_or_none(draws.behind),
            bool(draws.adjustments),
            draws.reports_scores,
            None if masks is None else masks.words,
            None if masks is None else masks.rows,
        )
        return self.compute_with_ranks(message, draw)

    def allocate_masks(self, rows: int, words: int) -> Ints:
        return self.compute_with_ranks(
            AllocateMasks(rows, words), partial(self._runner.allocate_masks, rows, words)
        )


def _int32_or_none(behind: Ints | None) -> Ints | None:
    return None if behind is None else behind.astype(np.int32)


def start_ranks(links: RankLinks, capacity: Capacity) -> None:
    """Makes the other ranks create their runners once they have loaded their parts. Raises the same
    errors as `RankLinks.wait_until_loaded`.
    """
    links.wait_until_loaded()
    links.send(_encoder.encode(Begin(capacity)))


def follow_rank_0(messages: Iterable[RankMessage], make: Callable[[Capacity], ModelRunner]) -> None:
    """Computes a rank's part of the work that rank 0 sends, until there are no more messages.

    Args:
        messages: messages of rank 0.
        make: creates the rank's runner.
    """
    runner: ModelRunner | None = None
    stages: Stages | None = None  # on a GPU
    forward: Any = None  # of the runner, on a CPU
    # memory of masks, and draws that may read it
    words = np.zeros((0, 0), dtype=np.int32)
    pending = None
    for message in messages:
        match message:
            case Begin():
                runner = make(message.capacity)
                stages = (
                    None
                    if isinstance(runner, CpuRunner)
                    else _make_stages(cast("GpuRunner", runner))
                )
            case Forward() if stages is not None:
                stages.begin_step(message.record)
            case Forward() if runner is not None:
                forward = runner.forward(message.record)
            case Draw() if isinstance(runner, CpuRunner):
                # messages' arrays are read-only
                behind = None if message.behind is None else message.behind.copy()
                runner.logits(forward, message.rows.astype(np.int64), behind)
            case MoveExperts() if runner is not None:
                move_experts(runner.model, message.layer, message.slots)
            case AllocateMasks() if runner is not None:
                words = runner.allocate_masks(message.rows, message.words)
            case DrawParts() if stages is not None:
                pending = _draw_like_rank_0(
                    cast("GpuRunner", runner),
                    stages.finish_step(message.step),
                    message,
                    words,
                    pending,
                )


def _make_stages(runner: GpuRunner) -> Stages:
    """Creates the `Stages` that a rank's steps pass through."""
    from sglang_lite.runtime.executor.stages import Stages  # imports Triton

    parts = runner.model.parts
    assert parts is not None, "there are several ranks"
    return Stages(runner, parts.ranks)


def move_experts(model: Model, layer: int | None, slots: tuple[int, ...]) -> None:
    """Changes the experts that a rank holds. Takes the same arguments as `ExpertMoves.move`."""
    moves = cast("Decoder", model).expert_moves
    assert moves is not None, "all ranks have the same settings"
    moves.move(layer, slots)


def _draw_like_rank_0(
    runner: GpuRunner,
    forward: GpuForward,
    message: DrawParts,
    words: Ints,
    masked: GpuPendingTokens | None,
) -> GpuPendingTokens | None:
    """Draws the same tokens as rank 0. Returns the latest draw that used masks, which must finish
    before new masks are written.

    Args:
        runner, forward: runner of this rank, and the forward to draw from.
        message: what rank 0 draws.
        words: memory of masks.
        masked: last draws with masks.
    """
    rows = message.rows.astype(np.int64)
    masks = None
    if message.words is not None and message.mask_rows is not None:
        if masked is not None:
            masked.wait_for_tokens()
        words[: len(message.words)] = message.words
        masks = Masks(words[: len(message.words)], message.mask_rows)
    scored = np.ones(len(rows), dtype=bool) if message.scored else None
    drawn = runner.sample(
        forward, Draws(rows, None if message.adjusted else {}, masks, scored, message.behind)
    )
    return masked if masks is None or message.adjusted else cast("GpuPendingTokens", drawn)
