"""GPU runner: the state of slots stays on the device, a step copies one small buffer, and decoding
runs as captured CUDA graphs.

The tokens of a step stay on the device, where the next step reads them; the host reads them one
step later. All work is launched on one stream, so a reused page is written only after all reads
that were launched before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import msgspec
import numpy as np
import torch

from sglang_lite.protocol import RecordName, SamplingParams, TokenArray
from sglang_lite.runtime.attention.base import AttentionRequirements, ModelAttention
from sglang_lite.runtime.attention.cross import CrossAttention
from sglang_lite.runtime.attention.registry import make_layers_attention
from sglang_lite.runtime.executor.cuda_graphs import CapturedGraph, CudaGraphs
from sglang_lite.runtime.executor.gpu_adapters import GpuAdapters
from sglang_lite.runtime.executor.gpu_draws import GpuDraws, GpuPendingTokens
from sglang_lite.runtime.executor.gpu_inputs import (
    BLOCK_SIZES,
    MAX_TOKEN_READS,
    GpuInputs,
    build_gpu_inputs,
)
from sglang_lite.runtime.executor.gpu_slots import GpuSlots
from sglang_lite.runtime.executor.logit_adjustments import DrawAdjustments
from sglang_lite.runtime.executor.mask_events import MaskEvents
from sglang_lite.runtime.executor.page_memory import GpuPageMemory, GpuStateMemory
from sglang_lite.runtime.executor.prefill_graphs import PrefillGraphs, max_captured_tokens
from sglang_lite.runtime.executor.prefix_groups import (
    LATENT_SAVING_FACTOR,
    MAX_CHUNKS,
    PrefixGroups,
    SharedPrefixArrays,
)
from sglang_lite.runtime.executor.prompt_logprobs import (
    FIRST_ROWS,
    PromptLogprobs,
    TokensToScore,
    score_prompts,
    score_rows,
)
from sglang_lite.runtime.executor.sampler import Draws, Masks, SampledTokens
from sglang_lite.runtime.executor.staging import Staging
from sglang_lite.runtime.executor.state_waves import build_state_waves, make_state_rows
from sglang_lite.runtime.executor.step_record import SAMPLING, SlotPages, StepRecord
from sglang_lite.runtime.executor.token_records import read_records
from sglang_lite.runtime.kernels.arena import Arena
from sglang_lite.runtime.kernels.attention_metadata import DevicePlan, SharedPrefixes
from sglang_lite.runtime.kernels.device_properties import properties_of
from sglang_lite.runtime.kernels.invariant_attention import (
    piece_borders,
    queries_per_prompt_program,
)
from sglang_lite.runtime.kernels.kv_copy import KVCopy
from sglang_lite.runtime.kernels.lora_own import is_own_lora_faster
from sglang_lite.runtime.kernels.lora_weights import LoraStep
from sglang_lite.runtime.kernels.page_table import update_pages
from sglang_lite.runtime.kernels.prefix_attention import hopper_prefix_module, queries_per_program
from sglang_lite.runtime.kernels.state_rows import StateWave
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.models.lora.pool import COLUMN
from sglang_lite.runtime.models.model import DeviceModel
from sglang_lite.runtime.models.spec import LatentSpec
from sglang_lite.runtime.parallel.layout import ALONE
from sglang_lite.runtime.parallel.shared_steps import UNSHARED
from sglang_lite.runtime.requests.resolved_params import resolve_params

_EVERY_OPTION = SamplingParams(
    repetition_penalty=1.1,
    frequency_penalty=0.1,
    presence_penalty=0.1,
    logit_bias=((0, 0.0),),
    allowed_token_ids=(0,),
    return_logprob=True,
    top_logprobs_num=2,
    token_ids_logprob=(0,),
)
_DRAFTED_TOKENS = 128  # decoded tokens that a step with drafts may reach in an engine with few rows


@dataclass(frozen=True, slots=True)
class GpuForward:
    """Forward that has been launched.

    Attributes:
        record: step that the forward computes.
        hidden: the model's output for tokens [T, hidden_size]; empty if a captured graph computed
            the logits. With several stages, valid until the next forward.
        logits: logits [N, vocab_size]; None if no captured graph computed them.
        last: int32 [rows], index of each row's last token in `hidden` or `logits`.
        scored: log-probabilities of prompt tokens, by row of the step.
        graph: captured decoding graph that ran, or None.
        done: event after the forward, or None. Recorded only in some steps whose draws may wait for
            masks.
        token_slots: int64 [T], slots of the tokens in the cache; None if they are not needed.
    """

    record: StepRecord
    hidden: torch.Tensor
    logits: torch.Tensor | None
    last: Ints
    scored: dict[int, PromptLogprobs]
    graph: CapturedGraph | None
    done: torch.cuda.Event | None = None
    token_slots: torch.Tensor | None = None


class GpuRunner:
    """Runs steps with fused kernels; a `ModelRunner`.

    Args:
        model: model to run.
        slot_pages: pages of the slots, still empty.
        pages: number of pages in the KV pool; the cache has one more, the dummy page for padding.
        step_tokens: maximum number of tokens in a step.
        attention: name of the attention backend, or "auto".
        graphs: numbers of rows to capture CUDA graphs for; ignored if the model or the attention
            backend can't be captured.
        draft_tokens: maximum number of guesses in a draft; 0 if no drafts are checked.
        original_logprobs: whether log-probabilities are computed before the logits are adjusted, as
            in `executor.sampler.sample`.
        window_pages: number of pages in the layers with a window, excluding a dummy page; 0 if they
            have `pages`.
        states: number of places for states of sequences, if the model has any.
        adapters: adapters that requests may have; None if none may.

    Raises:
        ParameterError: the attention backend can't run the model.
    """

    def __init__(
        self,
        model: DeviceModel,
        slot_pages: SlotPages,
        pages: int,
        step_tokens: int,
        attention: str = "auto",
        graphs: tuple[int, ...] = (),
        *,
        draft_tokens: int = 0,
        original_logprobs: bool = False,
        window_pages: int = 0,
        states: int = 0,
        adapters: GpuAdapters | None = None,
    ) -> None:
        self._model = model
        self._slot_pages = slot_pages
        self._longest = slot_pages.longest
        self._device = device = model.device
        slots = len(slot_pages.pages)
        page_size = slot_pages.page_size
        heads = model.attentions[0]
        self._cache = model.allocate_cache(
            (pages + 1) * page_size,
            window_pages and (window_pages + 1) * page_size,
            states,
        )
        self._has_states = states > 0
        self._copy, self._window_copy = (
            KVCopy(self._cache.of_kind(windowed=kind)) for kind in (False, True)
        )
        self._max_decoded_tokens = max(2 * slots, min(slots * (1 + draft_tokens), _DRAFTED_TOKENS))
        # One latent counts as one KV head for every four query heads.
        kv_heads = max(heads.heads // 4, 1) if isinstance(heads, LatentSpec) else heads.kv_heads
        self._max_token_reads = MAX_TOKEN_READS // kv_heads
        self._attention = _make_attention(attention, model, self._max_decoded_tokens, self._longest)
        self._staging = Staging(device, 3 * step_tokens + 8 * (slots + 1) + 4096)
        self._slots = GpuSlots(
            slot_pages, pages, self._staging, device, window_pages, adapters, model.rope_axes
        )
        self.adapters, self._lora = (
            adapters,
            None if adapters is None else adapters.build_lora_step(self._slots.adapters),
        )
        self._own = _per_row_lora_step(self._lora, adapters)
        # first token slots of the dummy pages
        self._dummy_tokens = pages * page_size, window_pages * page_size
        self._events = MaskEvents(device)
        self._target_chunks = -(-properties_of(device).programs_to_fill // heads.kv_heads)
        shares = model.shares_prefixes and self._attention.shares_prefixes
        self._prefixes = (
            _make_prefix_groups(model, slot_pages, self._target_chunks) if shares else None
        )
        self._sharing = (False,) if self._prefixes is None else (False, True)
        captured = self._attention.capturable and model.uncapturable is None
        parallel = ALONE if model.parts is None else model.parts.ranks.parallel
        self._staged = parallel.pp > 1
        received = (
            allocate_rows(model, 2 * self._max_decoded_tokens) if parallel.stage > 0 else None
        )
        self.graphs = CudaGraphs(
            graphs if captured else (),
            self._max_decoded_tokens,
            self._slots,
            self._staging,
            extra_items=self._target_chunks,
            vocab_size=model.vocab_size if model.parts is None else model.parts.size,
            dtype=model.precision.compute,
            drafts=draft_tokens > 0 or self._staged,
            received=received,
            states=self._has_states,
        )
        self._draws = GpuDraws(
            self._slots,
            self._staging,
            device,
            self.graphs,
            original_logprobs=original_logprobs,
            alike=model.precision.batch_invariant,
            parts=model.parts,
        )
        alone = not self._staged and model.steps is UNSHARED
        alone &= not self._has_states
        max_captured = max_captured_tokens(model, step_tokens) if self.graphs.sizes and alone else 0
        self.prompts = PrefillGraphs(
            max_captured, self._slots, self._staging, page_size, self.graphs.capture_function
        )
        model.steps.set_graph_replay(
            partial(self.graphs.run_padding_graph, self._compute_hidden_or_logits),
            min(self.graphs.sizes, default=0),
        )

    @property
    def model(self) -> DeviceModel:
        return self._model

    def read_recorded_values(
        self, token_slots: Ints, names: Iterable[RecordName]
    ) -> dict[str, TokenArray]:
        """Waits for all launched forwards. Then returns values that the cache has recorded for the
        tokens in `token_slots`, int32 [N], such as the experts they chose.
        """
        return read_records(self._cache, token_slots, names)

    def allocate_page_memory(self, slots: int) -> GpuPageMemory:
        """Allocates host memory for copies of `slots` pages of the KV cache.

        Raises:
            ModelError: this much memory can't be pinned.
        """
        return GpuPageMemory(self._cache.planes, self._slot_pages.page_size, slots)

    def allocate_state_memory(self, slots: int) -> GpuStateMemory:
        """Allocates host memory for copies of `slots` states. Its pages are the places of states.

        Raises:
            ModelError: this much memory can't be pinned.
        """
        return GpuStateMemory(self._cache.state_planes, slots)

    @property
    def cache_memory(self) -> Arena | None:
        memory: Arena | None = self._cache.memory
        return memory

    def drop_graphs(self) -> None:
        """Frees the captured graphs."""
        self.graphs.drop_decode_graphs()
        self.prompts.drop_prefill_graphs()

    def capture_graphs(self) -> None:
        """Captures the decoding graphs again. Prompt graphs are captured when a step first needs
        them.
        """
        self.graphs.capture_all(
            self._compute_hidden_or_logits,
            self._sharing,
            (None, *filter(None, (self._lora, self._own))),
        )

    def close(self) -> None:
        """Frees the GPU's memory. No method may be called afterwards."""
        self.drop_graphs()
        del (
            self._model,
            self._cache,
            self._copy,
            self._window_copy,
            self._attention,
            self._slots,
            self._draws,
        )
        del self.graphs, self.prompts, self.adapters, self._lora, self._own
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ---------------------------------------------------------------------------------------- steps

    @torch.inference_mode()
    def forward(self, record: StepRecord, rows: torch.Tensor | None = None) -> GpuForward:
        """Launches the forward of a step, or this rank's stage of it.

        Args:
            record: the step.
            rows: [T, hidden_size] from the previous stage; None to begin with embeddings.
        """
        captured = self.graphs.can_run(record)
        prefixes = self._prefixes
        inputs = build_gpu_inputs(
            record,
            self._max_decoded_tokens,
            max_token_reads=self._max_token_reads if captured else 0,
            queries_per_read=1 if prefixes is None else prefixes.rows_per_block,
        )
        for copy, slots in ((self._copy, record.copies), (self._window_copy, record.window_copies)):
            if slots.shape[1]:
                # Each in a separate tensor: the kernel is compiled for addresses that are multiples
                # of 16.
                copy(*(torch.from_numpy(at.astype(np.int64)).to(self._device) for at in slots))
        self._slots.apply_record_on_device(record)
        adapters = record.changes_of(COLUMN)
        lora = self._lora if adapters.distinct else None
        if self.adapters is not None:
            self.adapters.wait_for(adapters.values)
        multi_token_rows = inputs.decoding > record.singles
        shared = (
            None
            if prefixes is None or inputs.decoding > self._max_decoded_tokens
            else prefixes.find_prefixes(
                record, self.graphs.padded_rows, multi_token_rows=multi_token_rows
            )
        )
        decoded = self._own if is_own_lora_faster(adapters.distinct, len(inputs.ids)) else lora
        with self._model.steps.enter_step(
            len(inputs.ids), self.graphs.smallest_graph_size(inputs) if captured else 0
        ) as size:
            if size:
                if size > self._max_decoded_tokens:  # because another replica has this many
                    shared = None
                graph = self.graphs.find_or_capture(
                    self._compute_hidden_or_logits, inputs, size, shared is not None, decoded
                )
                logits, last = graph.run(inputs, shared, rows)
                if self._staged:
                    return self._build_stage_forward(record, logits, last, graph.plan)
                if graph.draws is None:
                    self._draws.capture_draws(graph, self._model.logit_softcap)
                return GpuForward(
                    record,
                    logits[:0],
                    logits,
                    last,
                    {},
                    graph,
                    self._events.record_after_forward(record),
                )
            if self._staged:
                plan = replace(self._send_and_plan_step(inputs, shared), rows=rows)
                return self._build_stage_forward(record, self._run_model(plan), inputs.last, plan)
            prefilled = self.prompts.run(self._run_model, inputs, lora) if shared is None else None
            hidden, last = prefilled or (
                self._run_model(
                    replace(
                        self._send_and_plan_step(inputs, shared),
                        lora=lora,
                        features=record.has_ready_embeddings,
                        states=build_state_waves(record, self._device),
                    )
                ),
                inputs.last,
            )
        scored = score_prompts(self._model, record, last, hidden, self._staging.fetch)
        return GpuForward(
            record, hidden, None, last, scored, None, self._events.record_after_forward(record)
        )

    def _build_stage_forward(
        self, record: StepRecord, rows: torch.Tensor, last: Ints, plan: DevicePlan
    ) -> GpuForward:
        """Returns the `GpuForward` of this rank's stage. Its hidden states are `rows`, the output
        of the stage. It has no logits.
        """
        at = None if self._cache.hidden is None else plan.token_slots[: len(record.ids)]
        return GpuForward(
            record, rows, None, last, {}, None, self._events.record_after_forward(record), at
        )

    @torch.inference_mode()
    def finish_forward(self, forward: GpuForward, rows: torch.Tensor) -> None:
        """Finishes a step that has passed all stages: records its hidden states and scores its
        prompt tokens, if requested. All ranks must call this at the same time.

        Args:
            forward: forward of the step.
            rows: on ranks of the last stage, its output [T, hidden_size]; on other ranks, any
                tensor of this shape.
        """
        record = forward.record
        if forward.token_slots is not None:
            self._cache.record_hidden(forward.token_slots, self._model.finish_hidden(rows))
        forward.scored.update(
            score_prompts(self._model, record, forward.last, rows, self._staging.fetch)
        )

    @torch.inference_mode()
    def sample(self, forward: GpuForward, draws: Draws) -> GpuPendingTokens | SampledTokens:
        """Launches the draws of the next tokens of some rows."""
        rows = draws.rows
        adjustments = draws.adjustments
        masks = draws.masks
        if not len(rows):
            return SampledTokens((), {})
        record = forward.record
        graph = forward.graph
        waiting = (
            None
            if masks is None or forward.done is None
            else (forward.done, self._events.record_mask_event())
        )
        softcap = self._model.logit_softcap
        back = np.int32(0) if draws.behind is None else draws.behind
        positions = record.ends[rows] - back
        last = forward.last[rows] - back
        if adjustments is None:
            return self._draws.join_draw_of_rank_0(
                self._select_logits(forward, last), record.slots[rows]
            )
        alike = len(rows) == len(record.slots) and not adjustments
        if graph is not None and alike and self._draws.can_replay(graph, record.slots):
            return self._draws.replay(
                graph, positions, masks, softcap, waiting, scored=draws.reports_scores
            )
        return self._draws.draw(
            self._select_logits(forward, last),
            record.slots[rows],
            positions,
            adjustments,
            masks,
            softcap,
            waiting,
            scored=draws.reports_scores,
        )

    def _select_logits(self, forward: GpuForward, at: Ints) -> torch.Tensor:
        """Returns the logits of the tokens at indices `at`. If these are the first indices of
        logits that a graph computed, the result is a view, else a new tensor.
        """
        if forward.logits is not None and np.array_equal(at, np.arange(len(at))):
            return forward.logits[: len(at)]
        where = self._staging.send(at)
        return (
            self._model.raw_logits(forward.hidden[where])
            if forward.logits is None
            else forward.logits[where]
        )

    def allocate_masks(self, rows: int, words: int) -> Ints:
        """Allocates pinned int32 [rows, words] for the token masks of a step; see `DeviceMasks`."""
        memory = self._draws.allocate_masks(rows, words)
        for graph in () if self._staged else self.graphs.captured.values():
            self._draws.capture_draws(graph, self._model.logit_softcap)
        return memory

    def _run_model(self, plan: DevicePlan) -> torch.Tensor:
        hidden = self._model.run(plan, self._cache, self._attention.plan_step(plan))
        if self._cache.hidden is not None and not self._staged:
            self._cache.record_hidden(plan.token_slots, hidden)
        return hidden

    def _compute_hidden_or_logits(
        self, plan: DevicePlan, last: torch.Tensor | None, out: torch.Tensor
    ) -> torch.Tensor:
        self._model.steps.set_all_row_counts(len(plan.ids))
        hidden = self._run_model(plan)
        return (
            hidden
            if self._staged
            else self._model.raw_logits(hidden if last is None else hidden[last], out)
        )

    # ---------------------------------------------------------------------------------- preparation

    def warm_up(self) -> None:
        """Compiles every kernel, captures the graphs and runs first steps, so that no request has
        to wait for these.
        """
        for count in _powers_of_two_up_to(2 * self._max_decoded_tokens):
            for shared in self._sharing if 1 < count <= self._max_decoded_tokens else (False,):
                self._warm_up_step(
                    count, decoding=count, blocks=[], block_size=BLOCK_SIZES[0], shares=shared
                )
        self.capture_graphs()
        page_table = self._slots.page_table
        for copy, at in zip((self._copy, self._window_copy), self._dummy_tokens):
            dummy = torch.full((1,), at, dtype=torch.int64, device=self._device)
            copy(dummy, dummy)
        last = torch.tensor([page_table.numel() - 1], dtype=torch.int32, device=self._device)
        update_pages(page_table, last, page_table.view(-1)[-1:].clone())
        # Blocks come last, as their kernels take longest to compile.
        longest = self._longest  # learned position embeddings end here
        for block in BLOCK_SIZES:
            count = min(block, longest)
            self._warm_up_step(
                count, decoding=0, blocks=[(0, count, self._slots.dummy, 0)], block_size=block
            )
        if self._device.type != "meta":
            self._run_first_steps()

    @torch.inference_mode()
    def _run_first_steps(self) -> None:
        """Runs a prompt and then a single token, since torch loads an operator's kernel when it
        first runs. Draws from each step twice: with no options, and with every option of a request.
        Uses slot 0 and page 0, which no request has yet.
        """
        slots = np.zeros(1, dtype=np.int32)
        row = np.zeros(1, dtype=np.int64)
        count = min(FIRST_ROWS, self._longest)
        tokens = np.zeros(count, dtype=np.int32)
        options = resolve_params(_EVERY_OPTION, self._model.vocab_size)
        adjustments = {0: DrawAdjustments(options, tokens, prompt_len=0, banned=(0,))}
        masks = Masks(self._draws.allocate_masks(1, -(-self._model.vocab_size // 32)), slots)
        masks.words.fill(-1)  # masks that allow every token
        for start in (0, count - 1):
            forward = self.forward(self._one_row_record(slots, start, count))
            self.sample(forward, Draws(row)).wait_for_tokens()
            self.sample(
                forward, Draws(row, adjustments, masks, np.ones(1, dtype=bool))
            ).wait_for_tokens()
        prompt = self._one_row_record(slots, 0, count)
        inputs = build_gpu_inputs(
            prompt, self._max_decoded_tokens, max_token_reads=0, queries_per_read=1
        )
        with self._model.steps.enter_step(count):
            plan = self._send_and_plan_step(inputs, None)
            plan = replace(plan, states=build_state_waves(prompt, self._device))
            rows = [TokensToScore(1, tokens, self._run_model(plan))]
        score_rows(self._model, rows, 2, (0,), self._staging.fetch)[0].wait_for_logprobs()

    @torch.inference_mode()
    def _warm_up_step(
        self,
        count: int,
        *,
        decoding: int,
        blocks: list[tuple[int, int, int, int]],
        block_size: int,
        shares: bool = False,
    ) -> None:
        """Runs a step on tokens of the dummy slot to compile its kernels.

        Args:
            count: number of tokens.
            decoding: number of decoded tokens: all, or 0 with `blocks`.
            blocks: blocks of a prefill, as in DevicePlan.
            block_size: maximum number of tokens in a block.
            shares: whether to run the kernels of shared prefixes.
        """
        zeros = partial(torch.zeros, dtype=torch.int32, device=self._device)
        items = zeros(decoding + self._target_chunks, 6)
        none = zeros(decoding)
        shared = SharedPrefixes(none, none, none, items, MAX_CHUNKS) if shares else None
        slots = zeros(count).fill_(self._slots.dummy)
        positions = (
            zeros(count) if decoding else torch.arange(count, dtype=torch.int32).to(self._device)
        )
        of_blocks = torch.tensor(blocks, dtype=torch.int32, device=self._device).view(-1, 4)
        plan = self._slots.plan(
            zeros(count),
            slots,
            positions,
            zeros(3, count),
            decoding=decoding,
            blocks=of_blocks,
            block_size=block_size,
            shared=shared,
        )
        if self._has_states:
            counts = np.full(1 if blocks else count, count if blocks else 1, dtype=np.int32)
            nowhere = np.full_like(counts, -1)
            rows_of_states = make_state_rows(counts, nowhere, nowhere, self._device)
            plan = replace(plan, states=(StateWave(rows_of_states),))
        with self._model.steps.enter_step(count):
            if decoding and not shares:
                # as in graphs whose rows have one token each
                self._run_model(replace(plan, separate=True))
            if self._lora is not None:
                self._run_model(replace(plan, lora=self._lora))
            if self._own is not None and is_own_lora_faster(count, count):
                self._run_model(replace(plan, lora=self._own))
            if blocks and self._model.both_ways:
                self._run_model(replace(plan, limits=plan.positions + 1))
            if blocks:
                self._run_model(replace(plan, longest_uncached=self._longest + 1))
            hidden = self._run_model(plan)
        for rows in _powers_of_two_up_to(min(count, self._slots.dummy)):
            logits = self._model.raw_logits(hidden[:rows])
        self._draws.warm_up(logits[:1], slots[:1], plan.positions[:1], self._model.logit_softcap)

    def _one_row_record(self, slots: Ints, start: int, end: int) -> StepRecord:
        """Returns a step of one row: tokens `start` to `end` of one slot, with id 0."""
        record = _one_row_record(slots, start, end)
        if not self._has_states:
            return record
        place = np.zeros(1, dtype=np.int32)
        return msgspec.structs.replace(record, state_reads=place - 1, state_writes=place)

    def _send_and_plan_step(
        self, inputs: GpuInputs, shared: SharedPrefixArrays | None
    ) -> DevicePlan:
        count = inputs.decoding
        ids, slots, positions, blocks, *rotary = self._staging.send_all(
            *inputs.arrays(self._slots.axes is not None)
        )
        sent = None if shared is None else _send_shared_prefixes(self._staging, shared, count)
        plan = self._slots.plan(
            ids,
            slots,
            positions,
            torch.stack(rotary) if rotary else None,
            decoding=count,
            blocks=blocks.view(-1, 4),
            block_size=inputs.block_size,
            shared=sent,
        )
        limits = self._staging.send(inputs.limits) if inputs.limits.size else None
        return replace(plan, longest_uncached=inputs.longest_uncached, limits=limits)


def allocate_rows(model: DeviceModel, count: int) -> torch.Tensor:
    """Allocates memory for the output [count, hidden_size] of a model's layers."""
    assert model.spec is not None, "a decoder's layers"
    return torch.zeros(
        (count, model.spec.hidden_size), dtype=model.precision.compute, device=model.device
    )


def _send_shared_prefixes(
    staging: Staging, shared: SharedPrefixArrays, rows: int
) -> SharedPrefixes:
    padded = np.zeros((3, rows), dtype=np.int32)
    for row, array in zip(padded, (shared.lengths, shared.chunks, shared.order)):
        row[: len(array)] = array
    lengths, chunks, order, items = staging.send_all(*padded, shared.items.reshape(-1))
    return SharedPrefixes(lengths, chunks, order, items.view(-1, 6), MAX_CHUNKS)


def _make_attention(
    name: str, model: DeviceModel, max_decoded: int, longest: int
) -> ModelAttention:
    """Returns the attention of all layers of a model.

    Args:
        name: name of a backend, or "auto".
        model: the model.
        max_decoded: maximum number of tokens decoded in one step with shared prefixes; half of the
            overall maximum.
        longest: longest sequence in tokens.
    """
    precision = model.precision
    required = [
        AttentionRequirements(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.key_size,
            compute=precision.compute,
            cache=precision.cache,
            device=model.device,
            max_rows=2 * max_decoded,
            max_shared_rows=max_decoded,
            max_chunks=MAX_CHUNKS if model.shares_prefixes else 0,
            sinks=spec.sinks,
            chunked=spec.chunked,
            alibi=bool(spec.slopes),
            latent=spec.rank if isinstance(spec, LatentSpec) else 0,
            expanded=(spec.nope_size, spec.rope_size, spec.value_size)
            if isinstance(spec, LatentSpec)
            else None,
            batch_invariant=precision.batch_invariant,
            longest=longest,
            both_ways=model.both_ways,
        )
        for spec in model.attentions
    ]
    made = make_layers_attention(name, required)
    return made if model.sound is None else CrossAttention(made, model.sound)


def _make_prefix_groups(
    model: DeviceModel, slot_pages: SlotPages, target_chunks: int
) -> PrefixGroups:
    """Returns a `PrefixGroups` with the sizes that the kernel for shared prefixes needs."""
    heads = model.attentions[0]
    precision = model.precision
    group = heads.heads // heads.kv_heads
    queries = queries_per_program(group, precision.compute.itemsize)
    if isinstance(heads, LatentSpec):
        return PrefixGroups(slot_pages, target_chunks, queries // group, LATENT_SAVING_FACTOR)
    if precision.batch_invariant:
        rows = queries_per_prompt_program(heads.key_size) // group
        return PrefixGroups(
            slot_pages, target_chunks, rows, borders=piece_borders(slot_pages.longest)
        )
    properties = properties_of(model.device)
    page_size = slot_pages.page_size
    hopper = hopper_prefix_module(
        properties,
        heads.key_size,
        precision.compute,
        precision.cache,
        page_size,
        plain=heads.softcap is None and not heads.slopes,
    )
    if hopper is None:
        return PrefixGroups(slot_pages, target_chunks, queries // group)
    return PrefixGroups(
        slot_pages, hopper.programs(properties, heads.kv_heads), hopper.MAX_QUERIES // group
    )


def _one_row_record(slots: Ints, start: int, end: int) -> StepRecord:
    """Returns a step of one row: tokens `start` to `end` of one slot, with id 0."""
    single = int(end - start == 1)
    nothing = np.zeros(0, dtype=np.int32)
    return StepRecord(
        step=0,
        slots=slots,
        epochs=slots,
        starts=np.array([start], dtype=np.int32),
        ends=np.array([end], dtype=np.int32),
        decoding=single,
        singles=single,
        ids=np.zeros(end - start, dtype=np.int32),
        positions=np.arange(start, end, dtype=np.int32),
        copies=np.zeros((2, 0), dtype=np.int32),
        page_indices=nothing,
        pages=nothing,
        started=nothing,
        sampling=np.zeros(0, dtype=SAMPLING),
    )


def _powers_of_two_up_to(limit: int) -> list[int]:
    """Returns 1, 2, 4 and so on, then `limit`. Kernels are compiled for ranges of row counts
    between powers of two.
    """
    return [*(1 << i for i in range((limit - 1).bit_length())), limit]


def _per_row_lora_step(step: LoraStep | None, adapters: GpuAdapters | None) -> LoraStep | None:
    """Returns the LoRA step for the kernels of `lora_own.py`, which read each token's own matrices.
    These kernels are faster if most rows have different adapters. Returns None if there can't be
    enough adapters for that.
    """
    if step is None or adapters is None or not is_own_lora_faster(adapters.max_adapters, 1):
        return None
    return replace(step, own=True)
