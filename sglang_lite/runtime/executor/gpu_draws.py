"""Draws the next tokens on a GPU. Replays a step's captured draws if it has any. Otherwise launches
the kernels one by one, with the adjustments that the requests need.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from sglang_lite.protocol import ModelError, SglError
from sglang_lite.runtime.executor.cuda_graphs import CapturedGraph, CudaGraphs
from sglang_lite.runtime.executor.gpu_slots import GpuSlots
from sglang_lite.runtime.executor.logit_adjustments import DrawAdjustments, adjust_logits
from sglang_lite.runtime.executor.sampler import (
    Masks,
    SampledTokens,
    compute_draw_logprobs,
    log_softmax,
    token_logprob,
)
from sglang_lite.runtime.executor.staging import Staging
from sglang_lite.runtime.kernels import sampling as draws
from sglang_lite.runtime.kernels.sampling import (
    TokenMasks,
    draw,
    draw_part,
    pick_winner,
    token_scores,
)
from sglang_lite.runtime.kernels.sizes import cdiv
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.models.gpu_ranks import LogitParts
from sglang_lite.runtime.requests.request import not_finite_error

_MAX_CAPTURED_DRAWS = 64  # maximum number of rows of a graph whose draws are captured, too


@dataclass(frozen=True, slots=True)
class GpuPendingTokens:
    """Tokens that are being drawn and copied to the host.

    Attributes:
        tokens: int32 [R], on the host once `done` has occurred.
        done: event after the draws; None if the device is not a GPU.
        positions: positions [R] of the drawn tokens.
        adjustments, masks: arguments of `sample`.
        logprobs: log-probabilities [V] on the device, by row.
        errors: reason why a row has no valid token, by row.
        waiting: events at the start and the end of the device's wait for masks; None if it is not
            measured.
        scores: float32 [2, R], as in `SampledTokens`, on the host once `done` has occurred; None if
            none were requested.
    """

    tokens: torch.Tensor
    done: torch.cuda.Event | None
    positions: Ints
    adjustments: dict[int, DrawAdjustments]
    masks: Masks | None
    logprobs: dict[int, torch.Tensor]
    errors: dict[int, SglError]
    waiting: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    scores: torch.Tensor | None = None

    @property
    def ready(self) -> bool:
        return self.done is None or bool(self.done.query())  # type: ignore[no-untyped-call] # torch leaves it untyped

    def wait_for_tokens(self) -> SampledTokens:
        """Waits for the draws and returns the tokens."""
        if self.done is not None:
            self.done.synchronize()
        tokens = self.tokens.tolist()
        errors = dict(self.errors)
        for i, token in enumerate(tokens):
            if token >= 0 or i in errors:
                continue
            if token == draws.NOT_FINITE:
                errors[i] = not_finite_error(int(self.positions[i]))
            # otherwise the grammar's error explains it better
            elif self.masks is None or self.masks.rows[i] < 0:
                errors[i] = ModelError(
                    f"no token can follow at position {self.positions[i]}: all logits are -inf."
                )
        tokens = [max(token, 0) for token in tokens]
        logprobs = {
            i: token_logprob(row, tokens[i], self.adjustments[i].params)
            for i, row in self.logprobs.items()
        }
        waited = (
            None if self.waiting is None else self.waiting[0].elapsed_time(self.waiting[1]) / 1000
        )
        return SampledTokens(
            tokens, logprobs, errors, waited, None if self.scores is None else self.scores.numpy()
        )


class GpuDraws:
    """Draws tokens for a runner. The next step reads the results on the device.

    Args:
        slots: state of slots on the device: their parameters, and their last tokens, which draws
            replace.
        staging: copies to and from the device.
        device: device of the logits.
        graphs: graphs of the runner, which also capture their draws.
        original_logprobs: as for `GpuRunner`.
        alike: whether to draw from float32 logits in every step, not only with adjustments, so that
            a draw does not depend on the other rows' options.
        parts: how ranks share the logits; None if there is one rank. All ranks draw the same
            tokens. Each searches only its part of the vocabulary, unless `alike` is set or a row
            has a filter or adjustments or is scored: then the logits are gathered first. Rank 0
            draws rows with adjustments.
    """

    def __init__(
        self,
        slots: GpuSlots,
        staging: Staging,
        device: torch.device,
        graphs: CudaGraphs,
        *,
        original_logprobs: bool,
        alike: bool = False,
        parts: LogitParts | None = None,
    ) -> None:
        cuda = device.type == "cuda"
        self._slots = slots
        self._staging = staging
        self._device = device
        self._graphs = graphs
        self._original_logprobs = original_logprobs
        self._alike = alike
        self._parts = parts
        self._masks = DeviceMasks(device, 0, 0)  # empty until `allocate_masks`
        # Results of captured draws, in memory that the host can read.
        self._tokens = torch.empty(
            _MAX_CAPTURED_DRAWS, dtype=torch.int32, device=None if cuda else device, pin_memory=cuda
        )

    def allocate_masks(self, rows: int, words: int) -> Ints:
        """Allocates pinned int32 [rows, words] for the token masks of a step; see `DeviceMasks`.
        Draws captured before must be captured again.
        """
        self._masks = DeviceMasks(self._device, rows, words)
        return self._masks.words

    @torch.inference_mode()
    def capture_draws(self, graph: CapturedGraph, softcap: float | None) -> None:
        """Captures the draws of a graph that has few rows, each with one token. Launching the draw
        kernels for so few rows could take longer than running them.
        """
        plan = graph.plan
        rows = len(graph.logits)
        parts = self._parts
        if not plan.separate or rows > _MAX_CAPTURED_DRAWS:
            return

        def draw_rows(masked: bool) -> torch.Tensor:
            masks = self._masks.view_for_rows(rows) if masked else None
            if parts is not None and not self._alike:
                at = plan.slots[:rows], plan.positions[:rows]
                self._draw_parts(parts, graph.logits, *at, self._tokens[:rows], masks, softcap)
                return self._tokens
            whole = graph.logits if parts is None else parts.gather_logits(graph.logits)
            logits, cap = _copy_with_softcap(whole, softcap) if self._alike else (whole, softcap)
            draw(
                logits,
                plan.slots[:rows],
                plan.positions[:rows],
                self._slots.sampling,
                self._slots.last_tokens,
                self._tokens[:rows],
                masks=masks,
                softcap=cap,
            )
            return self._tokens

        graph.draws = (
            self._graphs.capture_function(partial(draw_rows, False))[0],
            self._graphs.capture_function(partial(draw_rows, True))[0],
        )

    def can_replay(self, graph: CapturedGraph, slots: Ints) -> bool:
        """Returns True if `replay` can draw this graph's rows: their draws have been captured and,
        if ranks share the logits, no filter applies to these slots.
        """
        captured = graph.plan.separate and graph.draws is not None
        return captured and (self._parts is None or not self._slots.any_filtered(slots))

    def replay(
        self,
        graph: CapturedGraph,
        positions: Ints,
        masks: Masks | None,
        softcap: float | None,
        waiting: tuple[torch.cuda.Event, torch.cuda.Event] | None,
        *,
        scored: bool = False,
    ) -> GpuPendingTokens:
        """Launches the captured draws of a graph that has run. The other arguments are those of
        `draw`.
        """
        assert graph.draws is not None
        if masks is not None:
            self._masks.send(masks, len(graph.logits))
        graph.draws[masks is not None].replay()
        rows = len(positions)
        tokens = self._tokens[:rows]
        scores = None
        if scored:
            logits = graph.logits[:rows]
            whole = logits if self._parts is None else self._parts.gather_logits(logits)
            scores = self._score_tokens(whole, tokens, masks, softcap)
        done = self._staging.record_event()
        return GpuPendingTokens(tokens, done, positions, {}, masks, {}, {}, waiting, scores)

    def draw(
        self,
        logits: torch.Tensor,
        slots: Ints,
        positions: Ints,
        adjustments: dict[int, DrawAdjustments],
        masks: Masks | None,
        softcap: float | None,
        waiting: tuple[torch.cuda.Event, torch.cuda.Event] | None,
        *,
        scored: bool = False,
    ) -> GpuPendingTokens:
        """Launches draws from logits.

        Args:
            logits: logits [R, vocab_size] or of this rank's part, which may be changed.
            slots, positions: slot of each row, and position of its drawn token.
            adjustments, masks: as for `ModelRunner.sample`.
            softcap: softcap of the logits that is not applied yet, or None.
            waiting: as in `GpuPendingTokens`.
            scored: whether to score the tokens.
        """
        reported = [i for i, row in adjustments.items() if row.params.return_logprob]
        logprobs: dict[int, torch.Tensor] = {}
        errors: dict[int, SglError] = {}
        parts = self._parts
        if parts is not None and (
            adjustments or self._alike or scored or self._slots.any_filtered(slots)
        ):
            logits = parts.gather_logits(logits)
            parts = None
        raw = logits
        raw_softcap = softcap
        if adjustments or self._alike:
            logits, softcap = _copy_with_softcap(logits, softcap)
            if self._original_logprobs:
                logprobs = {i: log_softmax(logits[i]) for i in reported}
            errors = adjust_logits(logits, adjustments)
        where = self._staging.send_all(slots, positions - 1)
        tokens = self._staging.host_buffer(len(slots))
        device_masks = None
        if masks is not None:
            self._masks.send(masks, len(slots))
            device_masks = self._masks.view_for_rows(len(slots))
        if not self._original_logprobs:
            for i in reported:
                if masks is not None and device_masks is not None and masks.rows[i] >= 0:
                    _mask_out(logits[i], device_masks.words[masks.rows[i]].to(logits.device))
                logprobs[i] = compute_draw_logprobs(logits[i], adjustments[i].params)
        if parts is not None:
            self._draw_parts(parts, logits, where[0], where[1], tokens, device_masks, softcap)
        else:
            draw(
                logits,
                where[0],
                where[1],
                self._slots.sampling,
                self._slots.last_tokens,
                tokens,
                masks=device_masks,
                softcap=softcap,
            )
        scores = self._score_tokens(raw, tokens, masks, raw_softcap) if scored else None
        if self._parts is not None and adjustments:
            self._adopt_tokens_of_rank_0(self._parts, where[0].long())
        done = self._staging.record_event()
        return GpuPendingTokens(
            tokens, done, positions, adjustments, masks, logprobs, errors, waiting, scores
        )

    def join_draw_of_rank_0(self, logits: torch.Tensor, slots: Ints) -> SampledTokens:
        """Joins a draw by rank 0, the only rank that knows the rows' adjustments. Contributes this
        rank's logits, then copies the drawn tokens from rank 0. The tokens stay on the device.

        Args:
            logits: logits [R, tokens] of this rank's part of the vocabulary.
            slots: slot of each row.
        """
        assert self._parts is not None
        self._parts.gather_logits(logits)
        self._adopt_tokens_of_rank_0(self._parts, self._staging.send(slots).long())
        return SampledTokens((), {})

    def _adopt_tokens_of_rank_0(self, parts: LogitParts, slots: torch.Tensor) -> None:
        """Copies the tokens that rank 0 drew last in some slots to all ranks."""
        last_tokens = self._slots.last_tokens
        last_tokens[slots] = parts.ranks.stack(last_tokens[slots])[0]

    def _draw_parts(
        self,
        parts: LogitParts,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        masks: TokenMasks | None,
        softcap: float | None,
    ) -> None:
        """Launches draws of rows without filters. Each rank finds the winners in its part of the
        vocabulary, and all ranks then pick the same overall winner.
        """
        found = draw_part(
            logits,
            slots,
            positions,
            self._slots.sampling,
            parts.first_block,
            parts.max_blocks,
            masks=masks and TokenMasks(parts.words(masks.words), masks.rows),
            softcap=softcap,
        )
        winners = parts.ranks.stack(found)
        pick_winner(
            winners, parts.max_blocks, slots, self._slots.sampling, self._slots.last_tokens, tokens
        )

    def _score_tokens(
        self, logits: torch.Tensor, tokens: torch.Tensor, masks: Masks | None, softcap: float | None
    ) -> torch.Tensor:
        """Launches the computation of the drawn tokens' log-probabilities from unadjusted logits.
        Returns float32 [2, R], as in `SampledTokens.scores`.
        """
        rows = len(tokens)
        scores = self._staging.host_buffer(2 * rows).view(torch.float32).view(2, rows)
        device_masks = None if masks is None else self._masks.view_for_rows(rows)
        token_scores(logits, tokens, scores, masks=device_masks, softcap=softcap)
        return scores

    def warm_up(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        softcap: float | None,
    ) -> None:
        """Compiles the draw kernels by drawing from one row of logits in the dummy slot."""
        tokens = torch.zeros(1, dtype=torch.int32, device=self._device)
        parts = self._parts
        if parts is not None:
            ones = torch.full(
                (1, cdiv(sum(parts.sizes), 32)), -1, dtype=torch.int32, device=self._device
            )
            for mask in (None, TokenMasks(ones, torch.zeros_like(tokens))):
                self._draw_parts(parts, logits, slots, positions, tokens, mask, softcap)
            for rows in (4, 2, 1):  # each number of rows has its own exchange kernel
                whole = parts.gather_logits(logits.expand(rows, -1))
            logits = whole
        masks = torch.full(
            (1, -(-logits.shape[1] // 32)), -1, dtype=torch.int32, device=self._device
        )
        scores = torch.zeros((2, 1), device=self._device)
        # The forms of `draw`: logits as computed, and float32 logits with the softcap applied.
        for one, cap in ((logits, softcap), (logits.float(), None)):
            for mask in (None, TokenMasks(masks, torch.zeros_like(tokens))):
                draw(
                    one,
                    slots,
                    positions,
                    self._slots.sampling,
                    self._slots.last_tokens,
                    tokens,
                    masks=mask,
                    softcap=cap,
                )
                if one is logits:  # tokens are scored by the logits as computed
                    token_scores(one, tokens, scores, masks=mask, softcap=cap)


def _copy_with_softcap(logits: torch.Tensor, softcap: float | None) -> tuple[torch.Tensor, None]:
    """Returns a float32 copy of the logits with the softcap applied. Also returns None, as the
    softcap that is still to be applied.
    """
    logits = logits.to(torch.float32, copy=True)
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap, None


def _mask_out(logits: torch.Tensor, words: torch.Tensor) -> None:
    """Sets the logits [V] of disallowed tokens to -inf, like the draw kernel does. A token is
    disallowed if its bit in the int32 words [ceil(V / 32)] is 0.
    """
    bits = (words.unsqueeze(1) >> torch.arange(32, device=words.device)) & 1
    logits.masked_fill_(bits.view(-1)[: len(logits)] == 0, float("-inf"))


# maximum number of rows whose draws read masks from host memory, since starting a copy takes longer
_MAX_ROWS_READ_FROM_HOST = 4


class DeviceMasks:
    """Token masks, sent to the device on a separate stream while the preceding forward runs. Masks
    for few rows stay on the host, where kernels read them.

    Only one step's masks exist at a time: new ones may be written only after the tokens of the step
    have been read.

    Args:
        device: device to send masks to.
        rows: maximum number of masks, and of rows of a step.
        words: int32 words of a mask.

    Attributes:
        words: int32 [rows, words], memory for the caller to write masks to.
    """

    def __init__(self, device: torch.device, rows: int, words: int) -> None:
        cuda = device.type == "cuda"
        self._host = torch.empty((rows, words), dtype=torch.int32, pin_memory=cuda)
        self._host_rows = torch.full((rows,), -1, dtype=torch.int32, pin_memory=cuda)
        self._masks = torch.empty((rows, words), dtype=torch.int32, device=device)
        self._rows = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call] # torch leaves it untyped
        self.words: Ints = self._host.numpy()
        self._which: Ints = self._host_rows.numpy()

    def view_for_rows(self, rows: int) -> TokenMasks:
        """Returns the masks for a step of `rows` rows, as kernels read them: from host memory for
        few rows, else from the device.
        """
        if rows <= _MAX_ROWS_READ_FROM_HOST:
            return TokenMasks(self._host, self._host_rows[:rows])
        return TokenMasks(self._masks, self._rows[:rows])

    def send(self, masks: Masks, rows: int) -> None:
        """Starts sending the first masks in `words` to the device. Kernels launched afterwards see
        them.

        Args:
            masks: the number of masks, and the index of each row's mask.
            rows: number of rows that draw; those beyond `masks.rows` have no mask.
        """
        count = len(masks.words)
        real = len(masks.rows)
        self._which[:real] = masks.rows
        self._which[real:rows] = -1
        if rows <= _MAX_ROWS_READ_FROM_HOST:
            return
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._masks[:count].copy_(self._host[:count], non_blocking=True)
            self._rows[:rows].copy_(self._host_rows[:rows], non_blocking=True)
        if self._stream is not None:
            torch.cuda.current_stream(self._masks.device).wait_stream(self._stream)
