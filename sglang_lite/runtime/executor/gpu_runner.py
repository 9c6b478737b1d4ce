"""The runner on a GPU: state that stays there, one small copy a step, captured graphs for decoding.

A step's tokens stay on the device, where the next step finds them; the host reads them one step later. Everything is
launched on one stream, so a page that is reused is written after all reads that were launched before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.protocol import ModelError, SamplingParams, SglError
from sglang_lite.runtime.attention.base import AttentionRequirements
from sglang_lite.runtime.attention.registry import make_layers_attention
from sglang_lite.runtime.executor.cuda_graphs import CapturedGraph, CudaGraphs
from sglang_lite.runtime.executor.device_masks import DeviceMasks
from sglang_lite.runtime.executor.gpu_inputs import BLOCK_SIZES, READ, GpuInputs, build_gpu_inputs
from sglang_lite.runtime.executor.gpu_slots import GpuSlots
from sglang_lite.runtime.executor.prefill_graphs import PrefillGraphs, captured_tokens
from sglang_lite.runtime.executor.prefix_groups import LATENTS, MOST_CHUNKS, PrefixGroups, SharedWork
from sglang_lite.runtime.executor.prompt_logprobs import FIRST_ROWS, Scored, Scoring, score, score_rows
from sglang_lite.runtime.executor.sampler import (
    DrawAdjustments,
    Masks,
    Sampled,
    SamplingTable,
    adjust_logits,
    draw_logprobs,
    token_logprob,
)
from sglang_lite.runtime.executor.staging import Staging, make_event
from sglang_lite.runtime.kernels import sampling as draws
from sglang_lite.runtime.kernels.attention_metadata import DevicePlan, SharedPrefixes
from sglang_lite.runtime.kernels.card import card_of
from sglang_lite.runtime.kernels.kv_copy import KVCopy
from sglang_lite.runtime.kernels.page_table import update_pages
from sglang_lite.runtime.kernels.prefix_attention import block_queries, prefix_on_hopper
from sglang_lite.runtime.kernels.sampling import draw
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.models.model import DeviceModel, Model, is_fused
from sglang_lite.runtime.models.spec import AttentionSpec, LatentSpec
from sglang_lite.runtime.request import WatchedTokens, not_finite
from sglang_lite.runtime.resolved_params import resolve_params
from sglang_lite.runtime.scheduler.batch import Batch

_TEXT = int(WatchedTokens.TEXT)  # comparing an array with a member of an enumeration is slow
_MARKS = 8  # events: two a step that has some, until its tokens are read
_MEASURED = 8  # steps with masks, of which one's waiting is measured: events take the host as long as a launch
_FEW = 64  # rows whose draws are captured


@dataclass(frozen=True, slots=True)
class GpuForward:
    """A forward that was launched.

    Attributes:
        batch: the batch that it computes.
        hidden: [T, hidden_size], where no graph gave logits.
        logits: [rows, vocab_size] of all rows, where one did.
        last: int64 [rows]: index of each row's last token.
        scored: by row of the batch, log-probabilities of its prompt tokens.
        graph: that ran.
        done: event at the end of a step that may wait for masks.
    """

    batch: Batch
    hidden: torch.Tensor | None
    logits: torch.Tensor | None
    last: Ints
    scored: dict[int, Scored]
    graph: CapturedGraph | None
    done: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class GpuPendingTokens:
    """Tokens that are being drawn and copied to the host.

    Attributes:
        tokens: int32 [R], on the host once `done` has come.
        positions: of the drawn tokens [R].
        special, masks: as `sample` took them.
        logprobs: by row, log-probabilities [V] on the device.
        errors: by row, the reason why it has no valid token.
        waiting: events from when to when the device waited for masks.
    """

    tokens: torch.Tensor
    done: torch.cuda.Event | None
    positions: Ints
    special: dict[int, DrawAdjustments]
    masks: Masks | None
    logprobs: dict[int, torch.Tensor]
    errors: dict[int, SglError]
    waiting: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def read(self) -> Sampled:
        """The tokens, after waiting for them."""
        if self.done is not None:
            self.done.synchronize()
        tokens = self.tokens.tolist()
        errors = dict(self.errors)
        for i, token in enumerate(tokens):
            if token >= 0 or i in errors:
                continue
            if token == draws.NOT_FINITE:
                errors[i] = not_finite(int(self.positions[i]))
            elif self.masks is None or self.masks.rows[i] < 0:  # a grammar says better why nothing can follow
                errors[i] = ModelError(f"no token can follow at position {self.positions[i]}: all logits are -inf.")
        tokens = [max(token, 0) for token in tokens]
        logprobs = {i: token_logprob(row, tokens[i], self.special[i].params) for i, row in self.logprobs.items()}
        waited = None if self.waiting is None else self.waiting[0].elapsed_time(self.waiting[1]) / 1000
        return Sampled(tokens, logprobs, errors, waited)


class GpuRunner:
    """Batches as fused kernels. Meets `ModelRunner`.

    Args:
        model: the model that runs.
        table: the slot table that batches refer to.
        sampling: parameters by slot.
        pages: pages in the KV pool; the cache has one more, for padding.
        step_tokens: most tokens in a step.
        attention: the backend's name, or "auto".
        graphs: batch sizes to capture, where the model's and the backend's steps can be.
        original_logprobs: as `executor.sampler.sample` takes it.

    Raises:
        ParameterError: the attention backend can't run the model.
    """

    def __init__(
        self,
        model: DeviceModel,
        table: SlotTable,
        sampling: SamplingTable,
        pages: int,
        step_tokens: int,
        attention: str = "auto",
        graphs: tuple[int, ...] = (),
        *,
        original_logprobs: bool = False,
    ) -> None:
        self._model, self._table = model, table
        self._original_logprobs = original_logprobs
        self._device = device = model.device
        slots, heads = len(table.length), model.attentions[0]
        self._cache = model.allocate_cache((pages + 1) * table.page_size)
        self._copy = KVCopy(self._cache)
        self._most_decoded = 2 * slots
        # A latent is read as a few heads for each 16 that attend.
        self._most_read = READ // (max(heads.heads // 4, 1) if isinstance(heads, LatentSpec) else heads.kv_heads)
        self._attention = make_layers_attention(attention, [self._needs(each) for each in model.attentions])
        self._masks = DeviceMasks(device, 0, 0)  # until those are allocated
        self._staging = Staging(device, 3 * step_tokens + 8 * (slots + 1) + 4096)
        cuda = device.type == "cuda"
        # Of captured draws.
        self._tokens = torch.empty(_FEW, dtype=torch.int32, device=None if cuda else device, pin_memory=cuda)
        self._slots = GpuSlots(table, sampling, pages, self._staging, device)
        self._dummy_token = pages * table.page_size  # in the cache, of no slot
        self._marks = cycle([make_event(timed=True) for _ in range(_MARKS if cuda else 0)])
        self._with_masks = 0  # steps
        self._prefixes: PrefixGroups | None = None
        self._pieces = -(-card_of(device).programs // heads.kv_heads)
        if model.shares_prefixes and self._attention.shares_prefixes:
            self._prefixes = self._find_prefixes(heads)
        captured = self._attention.captured and model.uncapturable is None
        self.graphs = CudaGraphs(
            graphs if captured else (), self._most_decoded, self._slots, self._staging,
            page_size=table.page_size, pieces=self._pieces, vocab_size=model.vocab_size,
            dtype=model.precision.compute,
        )  # fmt: skip
        most = captured_tokens(model, step_tokens) if self.graphs.sizes else 0
        self.prompts = PrefillGraphs(most, self._slots, self._staging, table.page_size, self.graphs.record)

    def _find_prefixes(self, heads: AttentionSpec | LatentSpec) -> PrefixGroups:
        group, precision = heads.heads // heads.kv_heads, self._model.precision
        queries = block_queries(group, precision.compute.itemsize)
        if isinstance(heads, LatentSpec):
            return PrefixGroups(self._table, self._pieces, queries // group, LATENTS)
        card, page_size = card_of(self._device), self._table.page_size
        hopper = prefix_on_hopper(card, heads.key_size, precision.compute, precision.cache, page_size, heads.softcap)
        if hopper is None:
            return PrefixGroups(self._table, self._pieces, queries // group)
        return PrefixGroups(self._table, hopper.programs(card, heads.kv_heads), hopper.MOST_QUERIES // group)

    @property
    def model(self) -> DeviceModel:
        return self._model

    def replace(self, model: Model) -> None:
        """Takes another model of the same shape. Keys and values in the cache stay those of the model before."""
        assert is_fused(model)
        self._model = model
        self._cache = replace(self._cache, scales=model.kv_scales)
        self.graphs.clear()
        self.prompts.clear()

    def close(self) -> None:
        """Frees the GPU's memory. No other call may follow."""
        self.graphs.clear()
        self.prompts.clear()
        del self._model, self._cache, self._copy, self._attention, self._slots, self._masks, self.graphs, self.prompts
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ---------------------------------------------------------------------------------------------- steps

    @torch.inference_mode()
    def forward(self, batch: Batch) -> GpuForward:
        """Launches the computation of the batch's tokens."""
        captured, prefixes = self.graphs.can_run(batch), self._prefixes
        inputs = build_gpu_inputs(
            batch, self._table, self._most_decoded, most_read=self._most_read if captured else 0,
            together=1 if prefixes is None else prefixes.rows_per_block,
        )  # fmt: skip
        if len(batch.copies[0]):
            self._copy(*(torch.from_numpy(at.astype(np.int64)).to(self._device) for at in batch.copies))
        self._slots.send_changes(batch)
        several = inputs.decoding > batch.singles
        shared = None if prefixes is None else prefixes.find(batch, self.graphs.padded, several=several)
        graph = self.graphs.find(self._compute, batch, inputs, shared is not None) if captured else None
        if graph is not None:
            logits = graph.run(inputs, shared)
            if graph.draws is None:
                self._capture_draws(graph)
            return GpuForward(batch, None, logits, inputs.last, {}, graph, self._mark(batch))
        read = self.prompts.run(self._run, inputs) if shared is None else None
        hidden, last = read or (self._run(self._plan(batch, inputs, shared)), inputs.last)
        scored = score(self._model, self._table, batch, last.tolist(), hidden, self._staging.fetch)
        return GpuForward(batch, hidden, None, last, scored, None, self._mark(batch))

    def _mark(self, batch: Batch) -> torch.cuda.Event | None:
        """A point in the device's time, for some steps whose rows are looked at one by one: those may have masks."""
        if self._device.type != "cuda" or not (self._table.look[batch.slots] >= _TEXT).any():
            return None
        self._with_masks += 1
        return self._now() if self._with_masks % _MEASURED == 1 else None

    def _now(self) -> torch.cuda.Event:
        mark = next(self._marks)
        mark.record()
        return mark

    @torch.inference_mode()
    def sample(
        self,
        forward: GpuForward,
        rows: NDArray[np.int64],
        special: dict[int, DrawAdjustments],
        masks: Masks | None = None,
    ) -> GpuPendingTokens | Sampled:
        """Launches the draws of the next tokens of some rows. Arguments as `ModelRunner.sample`."""
        if not len(rows):
            return Sampled((), {})
        batch, graph = forward.batch, forward.graph
        waiting = None if masks is None or forward.done is None else (forward.done, self._now())
        whole = graph is not None and graph.plan.separate and len(rows) == len(batch.slots)
        if not whole or graph is None or graph.draws is None or special:
            return self._draw_each(forward, rows, special, masks, waiting)
        if masks is not None:
            self._masks.send(masks, len(graph.logits))
        graph.draws[masks is not None].replay()
        tokens, done = self._tokens[: len(rows)], self._staging.written()
        return GpuPendingTokens(tokens, done, batch.ends[rows], {}, masks, {}, {}, waiting)

    def _draw_each(
        self, forward: GpuForward, rows: NDArray[np.int64], special: dict[int, DrawAdjustments], masks: Masks | None,
        waiting: tuple[torch.cuda.Event, torch.cuda.Event] | None,
    ) -> GpuPendingTokens:  # fmt: skip
        """`sample` without a captured draw."""
        batch, logits = forward.batch, self._logits_of(forward, rows)
        slots, positions = batch.slots[rows], batch.ends[rows]
        reported = [i for i, row in special.items() if row.params.return_logprob]
        logprobs: dict[int, torch.Tensor] = {}
        errors: dict[int, SglError] = {}
        softcap = self._model.logit_softcap
        if special:
            logits = logits.float()
            if softcap is not None:
                logits, softcap = torch.tanh(logits / softcap) * softcap, None
            if self._original_logprobs:
                logprobs = {i: logits[i].log_softmax(-1) for i in reported}
            for i, row in special.items():
                try:
                    adjust_logits(logits[i], row)
                except SglError as error:
                    errors[i] = error
        where = self._staging.send_all(slots, positions - 1)
        tokens = self._staging.room(len(rows))
        device_masks = mask_rows = None
        if masks is not None:
            self._masks.send(masks, len(rows))
            device_masks, mask_rows = self._masks.of(len(rows))
        if not self._original_logprobs:
            for i in reported:
                if masks is not None and device_masks is not None and masks.rows[i] >= 0:
                    _forbid(logits[i], device_masks[masks.rows[i]].to(logits.device))
                logprobs[i] = draw_logprobs(logits[i], special[i].params)
        draw(
            logits, where[0], where[1], self._slots.sampling, self._slots.drawn, tokens,
            masks=device_masks, mask_rows=mask_rows, softcap=softcap,
        )  # fmt: skip
        done = self._staging.written()
        return GpuPendingTokens(tokens, done, positions, special, masks, logprobs, errors, waiting)

    def _logits_of(self, forward: GpuForward, rows: NDArray[np.int64]) -> torch.Tensor:
        """Logits of some rows; a copy, unless they are all."""
        if forward.logits is None:
            assert forward.hidden is not None
            return self._model.raw_logits(forward.hidden[self._staging.send(forward.last[rows].astype(np.int32))])
        if len(rows) == len(forward.batch.slots):
            return forward.logits[: len(rows)]
        return forward.logits[self._staging.send(rows.astype(np.int32))]

    def allocate_masks(self, rows: int, words: int) -> Ints:
        """Pinned memory for the masks of a step, int32 [rows, words]; see DeviceMasks."""
        self._masks = DeviceMasks(self._device, rows, words)
        for graph in self.graphs.captured.values():
            self._capture_draws(graph)
        return self._masks.words

    @torch.inference_mode()
    def _capture_draws(self, graph: CapturedGraph) -> None:
        """Captures draws of the rows of a graph that is so fast that to launch their kernels could take longer."""
        plan, rows = graph.plan, len(graph.logits)
        if not plan.separate or rows > _FEW:
            return

        def drawn(masked: bool) -> torch.Tensor:
            masks, mask_rows = self._masks.of(rows) if masked else (None, None)
            draw(
                graph.logits, plan.slots[:rows], plan.positions[:rows], self._slots.sampling, self._slots.drawn,
                self._tokens[:rows], masks=masks, mask_rows=mask_rows, softcap=self._model.logit_softcap,
            )  # fmt: skip
            return self._tokens

        graph.draws = self.graphs.record(partial(drawn, False))[0], self.graphs.record(partial(drawn, True))[0]

    def _run(self, plan: DevicePlan) -> torch.Tensor:
        return self._model.run(plan, self._cache, self._attention.begin(plan))

    def _compute(self, plan: DevicePlan, last: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        hidden = self._run(plan)
        return self._model.raw_logits(hidden if last is None else hidden[last], out)

    def _needs(self, spec: AttentionSpec | LatentSpec) -> AttentionRequirements:
        """Requirements of a layer on attention."""
        precision = self._model.precision
        return AttentionRequirements(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.key_size,
            compute=precision.compute,
            cache=precision.cache,
            device=self._device,
            most_rows=self._most_decoded,
            most_chunks=MOST_CHUNKS if self._model.shares_prefixes else 0,
            sinks=spec.sinks,
            latent=spec.rank if isinstance(spec, LatentSpec) else 0,
            expanded=(spec.nope_size, spec.rope_size, spec.value_size) if isinstance(spec, LatentSpec) else None,
        )

    # --------------------------------------------------------------------------------------- preparation

    def warm_up(self) -> None:
        """Compiles every kernel, captures the graphs and runs first steps, so that no request waits for that."""
        sharing = (False,) if self._prefixes is None else (False, True)
        for count in _doubled(self._most_decoded):
            for shared in sharing if count > 1 else (False,):
                self._try(count, decoding=count, blocks=[], block_size=BLOCK_SIZES[0], shares=shared)
        self.graphs.capture_all(self._compute, sharing)
        page_table = self._slots.page_table
        dummy = torch.full((1,), self._dummy_token, dtype=torch.int64, device=self._device)
        self._copy(dummy, dummy)
        last = torch.tensor([page_table.numel() - 1], dtype=torch.int32, device=self._device)
        update_pages(page_table, last, page_table.view(-1)[-1:].clone())
        # Last, as their kernels take longest to compile.
        longest = self._table.tokens.shape[1] - 1  # positions that a module has learned end there
        for block in BLOCK_SIZES:
            count = min(block, longest)
            self._try(count, decoding=0, blocks=[(0, count, self._slots.dummy, 0)], block_size=block)
        if self._device.type != "meta":
            self._run_first_steps()

    @torch.inference_mode()
    def _run_first_steps(self) -> None:
        """A prompt and a token after it, drawn without and with everything that a request can ask for: torch loads
        what an operator needs when it first runs. They are slot 0's, in page 0, where no request's tokens are yet."""
        everything = resolve_params(
            SamplingParams(
                repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1, logit_bias=((0, 0.0),),
                return_logprob=True, top_logprobs_num=2, token_ids_logprob=(0,),
            ),
            self._model.vocab_size,
        )  # fmt: skip
        slots, row = np.zeros(1, dtype=np.int32), np.zeros(1, dtype=np.int64)
        count = min(FIRST_ROWS, self._table.tokens.shape[1] - 1)
        tokens = self._table.tokens[0, :count]
        special = {0: DrawAdjustments(everything, tokens, prompt_len=0, banned=(0,))}
        self._masks = DeviceMasks(self._device, 1, -(-self._model.vocab_size // 32))
        masks = Masks(self._masks.words, slots)
        masks.words.fill(-1)  # which forbids nothing
        for start in (0, count - 1):
            forward = self.forward(_one_row(slots, start, count))
            self.sample(forward, row, {}).read()
            self.sample(forward, row, special, masks).read()
        prompt = _one_row(slots, 0, count)
        inputs = build_gpu_inputs(prompt, self._table, self._most_decoded, most_read=0, together=1)
        rows = [Scoring(1, tokens, self._run(self._plan(prompt, inputs, None)))]
        score_rows(self._model, rows, 2, (0,), self._staging.fetch)[0].read()

    @torch.inference_mode()
    def _try(
        self,
        count: int,
        *,
        decoding: int,
        blocks: list[tuple[int, int, int, int]],
        block_size: int,
        shares: bool = False,
    ) -> None:
        """Runs tokens of the dummy slot."""

        def full(value: int, *shape: int) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=self._device)

        zeros = partial(full, 0)

        shared = None
        if shares:
            items = zeros(decoding + self._pieces, 6)
            shared = SharedPrefixes(zeros(decoding), zeros(decoding), zeros(decoding), items, MOST_CHUNKS)
        slots = full(self._slots.dummy, count)
        plan = DevicePlan(
            ids=zeros(count),
            slots=slots,
            positions=zeros(count) if decoding else torch.arange(count, dtype=torch.int32).to(self._device),
            drawn=self._slots.drawn,
            page_table=self._slots.page_table,
            page_size=self._table.page_size,
            decoding=decoding,
            shared=shared,
            blocks=torch.tensor(blocks, dtype=torch.int32, device=self._device).view(-1, 4),
            block_size=block_size,
        )
        if decoding and not shares:
            self._run(replace(plan, separate=True))  # as graphs of rows with one token
        if blocks:
            self._run(replace(plan, fresh=self._table.tokens.shape[1]))
        hidden = self._run(plan)
        for rows in _doubled(min(count, self._slots.dummy)):
            logits = self._model.raw_logits(hidden[:rows])
        masks = full(-1, 1, -(-logits.shape[1] // 32))
        softcap = self._model.logit_softcap
        for one, cap in ((logits[:1], softcap), (logits[:1].float(), None)):  # as they come to `sample`, and as it
            for mask, which in ((None, None), (masks, zeros(1))):  # changes those that need more than a draw
                draw(
                    one, slots[:1], plan.positions[:1], self._slots.sampling, self._slots.drawn, zeros(1),
                    masks=mask, mask_rows=which, softcap=cap,
                )  # fmt: skip

    def _plan(self, batch: Batch, inputs: GpuInputs, shared: SharedWork | None) -> DevicePlan:
        count = inputs.decoding
        ids, slots, positions, blocks = self._staging.send_all(
            inputs.ids, inputs.slots, inputs.positions, inputs.blocks.reshape(-1)
        )
        return DevicePlan(
            ids=ids,
            slots=slots,
            positions=positions,
            drawn=self._slots.drawn,
            page_table=self._slots.page_table,
            page_size=self._table.page_size,
            decoding=count,
            shared=None if shared is None else self._send_shared(shared, count),
            blocks=blocks.view(-1, 4),
            block_size=inputs.block_size,
            fresh=inputs.fresh,
        )

    def _send_shared(self, shared: SharedWork, rows: int) -> SharedPrefixes:
        padded = np.zeros((3, rows), dtype=np.int32)
        for row, array in zip(padded, (shared.lengths, shared.chunks, shared.order)):
            row[: len(array)] = array
        lengths, chunks, order, items = self._staging.send_all(*padded, shared.items.reshape(-1))
        return SharedPrefixes(lengths, chunks, order, items.view(-1, 6), MOST_CHUNKS)


def _one_row(slots: Ints, start: int, end: int) -> Batch:
    """A batch of one slot's tokens at these positions, of no request."""
    single, nothing = int(end - start == 1), np.zeros(0, dtype=np.int32)
    return Batch(
        step=0, requests=(), slots=slots, epochs=slots, starts=np.array([start], dtype=np.int32),
        ends=np.array([end], dtype=np.int32), decoding=single, singles=single, samples=np.ones(1, dtype=bool),
        unknown=np.zeros(1, dtype=bool), fresh=(), copies=(nothing, nothing),
    )  # fmt: skip


def _forbid(logits: torch.Tensor, words: torch.Tensor) -> None:
    """Rules out what the bits of int32 words [ceil(V / 32)] do not allow, in logits [V], as the draw's kernel does."""
    bits = (words.unsqueeze(1) >> torch.arange(32, device=words.device)) & 1
    logits.masked_fill_(bits.view(-1)[: len(logits)] == 0, float("-inf"))


def _doubled(most: int) -> list[int]:
    """1, 2, 4 and so on, up to `most`: kernels are compiled for numbers of rows between powers of two."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]
