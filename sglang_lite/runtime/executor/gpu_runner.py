"""Runs batches on a GPU: state that stays there, one small copy a step, captured graphs for decoding.

A step's tokens stay on the device, where the next step finds them; the host reads them one step later. Everything is
launched on one stream, so a page that is reused is written after all reads that were launched before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.protocol import ModelError, SglError
from sglang_lite.runtime.attention.base import AttentionRequirements
from sglang_lite.runtime.attention.registry import make_attention
from sglang_lite.runtime.executor.gpu_inputs import BLOCK_SIZES, DeviceInputs, device_inputs
from sglang_lite.runtime.executor.prefix_groups import MOST_CHUNKS, SharedWork, shared_work
from sglang_lite.runtime.executor.sampler import Masks, Sampled, SamplingTable, Special, adjust, describe, drawn_from
from sglang_lite.runtime.executor.scoring import Scored, score
from sglang_lite.runtime.kernels import sampling as draws
from sglang_lite.runtime.kernels.attention_metadata import PROGRAMS, DevicePlan, SharedPrefixes
from sglang_lite.runtime.kernels.kv_copy import KVCopy
from sglang_lite.runtime.kernels.page_table import update_pages
from sglang_lite.runtime.kernels.prefix_attention import block_queries
from sglang_lite.runtime.kernels.sampling import DeviceSampling, draw
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.table import SlotTable
from sglang_lite.runtime.models.device_decoder import DeviceDecoder
from sglang_lite.runtime.models.model import Model
from sglang_lite.runtime.request import not_finite
from sglang_lite.runtime.scheduler.batch import Batch

logger = logging.getLogger("sglang_lite")

_RING = 4  # steps whose copies may be under way


@dataclass(frozen=True, slots=True)
class DeviceForward:
    """
    Attributes:
        batch: that was run.
        hidden: [T, hidden_size], where no graph ran.
        logits: [rows, vocab_size] of all rows, where one did.
        last: int64 [rows]: index of each row's last token.
        scored: as Forward.
        done: when it is through, of a step that may wait for masks.
    """

    batch: Batch
    hidden: torch.Tensor | None
    logits: torch.Tensor | None
    last: Ints
    scored: dict[int, Scored]
    done: torch.cuda.Event | None = None


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Tokens that are being drawn and copied to the host. `waiting`: from when to when the device waited for masks."""

    tokens: torch.Tensor
    done: torch.cuda.Event | None
    positions: Ints
    special: dict[int, Special]
    masks: Masks | None
    logprobs: dict[int, torch.Tensor]
    errors: dict[int, SglError]
    waiting: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def read(self) -> Sampled:
        """Waits for them."""
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
        logprobs = {i: describe(row, tokens[i], self.special[i].params) for i, row in self.logprobs.items()}
        waited = None if self.waiting is None else self.waiting[0].elapsed_time(self.waiting[1]) / 1000
        return Sampled(tokens, logprobs, errors, waited)


class DeviceRunner:
    """
    Args:
        model: what runs.
        table: the slot table that batches refer to.
        sampling: parameters by slot.
        pages: in the KV pool; the cache has one more, for padding.
        step_tokens: most tokens in a step.
        attention: the backend's name, or "auto".
        graphs: batch sizes to capture, where attention can be.
        original_logprobs: as `execute.sampler.sample` takes it.

    Raises:
        ParameterError: that attention can't run the model.
    """

    def __init__(
        self,
        model: DeviceDecoder,
        table: SlotTable,
        sampling: SamplingTable,
        pages: int,
        step_tokens: int,
        attention: str = "auto",
        graphs: tuple[int, ...] = (),
        *,
        original_logprobs: bool = False,
    ) -> None:
        self._model, self._table, self._sampling = model, table, sampling
        self._original_logprobs = original_logprobs
        self._device = device = model.device
        self._slots = slots = len(table.length)
        self._cache = model.allocate_cache((pages + 1) * table.page_size)
        self._copy = KVCopy(self._cache)
        # The last row is the dummy slot: rows that pad a graph read and write the dummy page.
        per_slot = table.pages.shape[1]
        self._page_table = torch.zeros((slots + 1, per_slot), dtype=torch.int32, device=device)
        self._page_table[slots] = pages
        self._sent: Ints = np.zeros((slots, per_slot), dtype=np.int32)  # what the device's table has
        self._drawn = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self._parameters = torch.zeros(6 * (slots + 1), dtype=torch.int32, device=device)
        self._device_sampling = _views(self._parameters, slots + 1)
        self._most_decoded = 2 * slots
        self._attention = make_attention(attention, self._needs())
        self._shares_prefixes = model.shares_prefixes and self._attention.shares_prefixes
        self._staging = Staging(device, 3 * step_tokens + 8 * (slots + 1) + 4096)
        self._shared_key: bytes = b""
        self._shared_work: SharedWork | None = None
        self._logits: torch.Tensor | None = None  # of all graphs
        # By tokens, whether rows have several of them, and whether they share prefixes.
        self._graphs: dict[tuple[int, bool, bool], Graph] = {}
        self._graph_sizes = graphs if self._attention.captured else ()
        self._pool: Any = None

    @property
    def model(self) -> DeviceDecoder:
        return self._model

    def replace(self, model: Model) -> None:
        """Goes on with another model of the same shape. What the cache has is the old one's."""
        assert isinstance(model, DeviceDecoder)
        self._model = model
        self._cache = replace(self._cache, scales=model.kv_scales)
        self._graphs.clear()

    def close(self) -> None:
        """Gives the GPU's memory back. Nothing can be run any more."""
        self._graphs.clear()
        del self._model, self._cache, self._copy, self._attention, self._page_table, self._logits
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    # ---------------------------------------------------------------------------------------------- steps

    @torch.inference_mode()
    def forward(self, batch: Batch) -> DeviceForward:
        """Launches the computation of the batch's tokens."""
        inputs = device_inputs(batch, self._table, self._most_decoded)
        if len(batch.copies[0]):
            self._copy(*(torch.from_numpy(at.astype(np.int64)).to(self._device) for at in batch.copies))
        self._send_changes(batch)
        shared = self._shared(batch)
        graph = self._graph(batch, inputs, shared is not None)
        if graph is not None:
            return DeviceForward(batch, None, graph.run(inputs, shared), inputs.last, {}, self._mark(batch))
        hidden = self._run(self._plan(batch, inputs, shared))
        scored = score(self._model, self._table, batch, inputs.last.tolist(), hidden, self._staging.fetch)
        return DeviceForward(batch, hidden, None, inputs.last, scored, self._mark(batch))

    def _mark(self, batch: Batch) -> torch.cuda.Event | None:
        """A point in the device's time, for steps whose rows are looked at one by one: those may have masks."""
        if self._device.type != "cuda" or not self._table.watched[batch.slots].any():
            return None
        event = _event(timed=True)
        event.record()
        return event

    @torch.inference_mode()
    def sample(
        self, forward: DeviceForward, rows: NDArray[np.int64], special: dict[int, Special], masks: Masks | None = None
    ) -> PendingTokens | Sampled:
        """Launches the draws of the next tokens of some rows. Arguments as Runner.sample."""
        if not len(rows):
            return Sampled((), {})
        batch = forward.batch
        begins = None if masks is None else self._mark(batch)
        if forward.logits is not None:
            everything = len(rows) == len(batch.slots)
            logits = (
                forward.logits[: len(rows)] if everything else forward.logits[self._staging.send(rows.astype(np.int32))]
            )
        else:
            assert forward.hidden is not None
            logits = self._model.raw_logits(forward.hidden[self._staging.send(forward.last[rows].astype(np.int32))])
        slots, positions = batch.slots[rows], batch.ends[rows]
        reported = [i for i, row in special.items() if row.params.return_logprob]
        logprobs: dict[int, torch.Tensor] = {}
        errors: dict[int, SglError] = {}
        softcap = self._model.spec.logit_softcap
        if special:
            logits = logits.float()
            if softcap is not None:
                logits, softcap = torch.tanh(logits / softcap) * softcap, None
            if self._original_logprobs:
                logprobs = {i: logits[i].log_softmax(-1) for i in reported}
            for i, row in special.items():
                try:
                    adjust(logits[i], row)
                except SglError as error:
                    errors[i] = error
        where = self._staging.send_all(slots, positions - 1)
        tokens = torch.empty(len(rows), dtype=torch.int32, device=self._device)
        device_masks, mask_rows = self._send_masks(masks)
        if not self._original_logprobs:
            for i in reported:
                if masks is not None and device_masks is not None and masks.rows[i] >= 0:
                    _forbid(logits[i], device_masks[masks.rows[i]])
                logprobs[i] = drawn_from(logits[i], special[i].params)
        draw(
            logits, where[0], where[1], self._device_sampling, self._drawn, tokens,
            masks=device_masks, mask_rows=mask_rows, softcap=softcap,
        )  # fmt: skip
        host, done = self._staging.fetch(tokens)
        waiting = None if begins is None or forward.done is None else (forward.done, begins)
        return PendingTokens(host, done, positions, special, masks, logprobs, errors, waiting)

    def allocate_masks(self, rows: int, words: int) -> Ints:
        """Where the loop writes the masks of a step: memory that is copied to the device as it is. It is free again
        when the step's tokens have been read, and the loop writes there no sooner."""
        self._mask_buffer = torch.empty((rows, words), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return self._mask_buffer.numpy()

    def _send_masks(self, masks: Masks | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if masks is None:
            return None, None
        words = self._mask_buffer[: len(masks.words)].to(self._device, non_blocking=True)
        return words, self._staging.send(masks.rows)

    def _run(self, plan: DevicePlan) -> torch.Tensor:
        return self._model.run(plan, self._cache, self._attention.begin(plan))

    def _needs(self) -> AttentionRequirements:
        """What attention has to be able to do."""
        spec, precision = self._model.spec, self._model.precision
        return AttentionRequirements(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            compute=precision.compute,
            cache=precision.cache,
            device=self._device,
            most_rows=self._most_decoded,
            most_chunks=MOST_CHUNKS if self._model.shares_prefixes else 0,
        )

    # --------------------------------------------------------------------------------------- preparation

    def warm_up(self) -> None:
        """Compiles every kernel and captures the graphs, so that no request waits for that."""
        sharing = (False, True) if self._shares_prefixes else (False,)
        for count in _doubled(self._most_decoded):
            for shared in sharing if count > 1 else (False,):
                self._try(count, decoding=count, blocks=[], block_size=BLOCK_SIZES[0], shares=shared)
        longest = self._table.pages.shape[1] * self._table.page_size
        for block in BLOCK_SIZES:
            count = min(block, longest)
            self._try(count, decoding=0, blocks=[(0, count, self._slots, 0)], block_size=block)
        for size in sorted(self._graph_sizes, reverse=True):
            for shared in sharing if size > 1 else (False,):
                self._graphs[size, False, shared] = self._capture(size, several=False, shared=shared)
        for size in reversed(_token_sizes(self._most_decoded)) if self._graph_sizes else ():
            for shared in sharing:
                self._graphs[size, True, shared] = self._capture(size, several=True, shared=shared)
        dummy = self._page_table[self._slots, :1].long() * self._table.page_size
        self._copy(dummy, dummy)
        last = torch.tensor([self._page_table.numel() - 1], dtype=torch.int32, device=self._device)
        update_pages(self._page_table, last, self._page_table.view(-1)[-1:].clone())

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

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self._device)

        shared = None
        if shares:
            items = zeros(self._most_items(decoding), 6)
            shared = SharedPrefixes(zeros(decoding), zeros(decoding), zeros(decoding), items, MOST_CHUNKS)
        slots = zeros(count) + self._slots
        plan = DevicePlan(
            ids=zeros(count),
            slots=slots,
            positions=zeros(count) if decoding else torch.arange(count, dtype=torch.int32, device=self._device),
            drawn=self._drawn,
            page_table=self._page_table,
            page_size=self._table.page_size,
            decoding=decoding,
            shared=shared,
            blocks=torch.tensor(blocks, dtype=torch.int32, device=self._device).view(-1, 4),
            block_size=block_size,
        )
        hidden = self._run(plan)
        for rows in _doubled(min(count, self._slots)):
            logits = self._model.raw_logits(hidden[:rows])
        masks = zeros(1, -(-logits.shape[1] // 32)) - 1
        softcap = self._model.spec.logit_softcap
        for one, cap in ((logits[:1], softcap), (logits[:1].float(), None)):  # as they come to `sample`, and as it
            for mask, which in ((None, None), (masks, zeros(1))):  # changes those that need more than a draw
                draw(
                    one, slots[:1], plan.positions[:1], self._device_sampling, self._drawn, zeros(1),
                    masks=mask, mask_rows=which, softcap=cap,
                )  # fmt: skip
        self._model.logits(hidden[:1]).log_softmax(-1).topk(1)

    def _send_changes(self, batch: Batch) -> None:
        """Brings the device's page table and sampling parameters up to date with the batch's slots."""
        table = self._table
        if batch.fresh:
            self._parameters.copy_(self._staging.send(_packed(self._sampling)), non_blocking=True)
        most = int(table.held[batch.slots].max())
        now: Ints = table.pages[batch.slots, :most]
        row, page = (now != self._sent[batch.slots, :most]).nonzero()
        if len(row):
            values = now[row, page]
            at = batch.slots[row] * table.pages.shape[1] + page
            update_pages(self._page_table, *self._staging.send_all(at.astype(np.int32), values))
            self._sent[batch.slots[row], page] = values  # no sooner: memory may end before

    def _shared(self, batch: Batch) -> SharedWork | None:
        """What decoding rows share; looked for anew only when other rows are decoded."""
        count = batch.singles
        if count < 2 or not self._shares_prefixes:
            return None
        slots = batch.slots[:count]
        key = slots.tobytes() + batch.epochs[:count].tobytes()
        if key != self._shared_key:
            table = self._table
            held = batch.starts[:count] // table.page_size
            self._shared_key = key
            self._shared_work = shared_work(
                table.pages[slots, : int(held.max())], held, slots, table.page_size,
                rows_per_block=self._rows_per_block, most_items=self._most_items(self._padded(count)),
                enough=-(-PROGRAMS // self._model.spec.num_kv_heads),
            )  # fmt: skip
        return self._shared_work

    @property
    def _rows_per_block(self) -> int:
        spec = self._model.spec
        group = spec.num_heads // spec.num_kv_heads
        return block_queries(group, self._model.precision.compute.itemsize) // group

    def _most_items(self, rows: int) -> int:
        return rows + -(-PROGRAMS // self._model.spec.num_kv_heads)

    def _padded(self, rows: int) -> int:
        return min((size for size in self._graph_sizes if size >= rows), default=rows)

    def _plan(self, batch: Batch, inputs: DeviceInputs, shared: SharedWork | None) -> DevicePlan:
        count = inputs.decoding
        ids, slots, positions, blocks = self._staging.send_all(
            inputs.ids, inputs.slots, inputs.positions, inputs.blocks.reshape(-1)
        )
        return DevicePlan(
            ids=ids,
            slots=slots,
            positions=positions,
            drawn=self._drawn,
            page_table=self._page_table,
            page_size=self._table.page_size,
            decoding=count,
            shared=None if shared is None else self._send_shared(shared, count),
            blocks=blocks.view(-1, 4),
            block_size=inputs.block_size,
        )

    def _send_shared(self, shared: SharedWork, rows: int) -> SharedPrefixes:
        padded = np.zeros((3, rows), dtype=np.int32)
        for row, array in zip(padded, (shared.lengths, shared.chunks, shared.order)):
            row[: len(array)] = array
        lengths, chunks, order, items = self._staging.send_all(*padded, shared.items.reshape(-1))
        return SharedPrefixes(lengths, chunks, order, items.view(-1, 6), MOST_CHUNKS)

    # --------------------------------------------------------------------------------------------- graphs

    def _graph(self, batch: Batch, inputs: DeviceInputs, shared: bool) -> Graph | None:
        """A captured graph that can run the batch."""
        tokens, rows = len(inputs.ids), len(batch.slots)
        if inputs.decoding < tokens or any(r.score_from is not None for r in batch.requests[batch.decoding :]):
            return None
        size, several = self._padded(rows), tokens > rows
        if size not in self._graph_sizes:
            return None
        if several:
            size = next(most for most in _token_sizes(self._most_decoded) if most >= tokens)
        key = size, several, shared
        if key not in self._graphs:
            self._graphs[key] = self._capture(size, several=several, shared=shared)
        return self._graphs[key]

    def _capture(self, tokens: int, *, several: bool, shared: bool) -> Graph:
        """A graph that decodes so many tokens, and gives the logits of all; of each row's last one, where some rows
        have several."""
        device, items, stride = self._device, self._most_items(tokens), _aligned(tokens)
        static = torch.zeros((4, stride), dtype=torch.int32, device=device)
        static[1] = self._slots
        prefixes = shared_static = None
        if shared:
            shared_static = torch.zeros(3 * stride + 6 * items, dtype=torch.int32, device=device)
            lengths, chunks, order = shared_static[: 3 * stride].view(3, stride)[:, :tokens]
            prefixes = SharedPrefixes(lengths, chunks, order, shared_static[3 * stride :].view(-1, 6), MOST_CHUNKS)
        plan = DevicePlan(
            ids=static[0, :tokens],
            slots=static[1, :tokens],
            positions=static[2, :tokens],
            drawn=self._drawn,
            page_table=self._page_table,
            page_size=self._table.page_size,
            decoding=tokens,
            shared=prefixes,
            blocks=torch.zeros((0, 4), dtype=torch.int32, device=device),
            block_size=16,
        )

        rows = min(tokens, self._slots)
        spec = self._model.spec
        if self._logits is None:  # each graph's own would add up to as much as a model's weights
            shape = max(self._slots, *self._graph_sizes), spec.vocab_size
            self._logits = torch.empty(shape, dtype=self._model.precision.compute, device=device)
        room = self._logits[:rows]

        def compute() -> torch.Tensor:
            hidden = self._run(plan)
            logits = self._model.raw_logits(hidden[static[3, :rows]] if several else hidden)
            return room.copy_(logits)

        graph, logits = self._record(compute)
        return Graph(graph, plan, static, shared_static, logits, self._staging, self._slots)

    def _record(self, compute: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A graph that computes again what is then in the tensor."""
        compute()  # compiles what is not compiled yet, which can't be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = compute()
        if self._pool is None:
            self._pool = graph.pool()
        return graph, logits


@dataclass(slots=True)
class Graph:
    """A captured decoding step of some number of tokens."""

    graph: torch.cuda.CUDAGraph
    plan: DevicePlan
    static: torch.Tensor
    shared_static: torch.Tensor | None
    logits: torch.Tensor
    staging: Staging
    dummy: int
    _shared: SharedWork | None = None

    def run(self, inputs: DeviceInputs, shared: SharedWork | None) -> torch.Tensor:
        """Launches it; returns logits [rows, vocab_size], which the next run of any graph overwrites."""
        real, stride = len(inputs.ids), self.static.shape[1]
        rows = len(inputs.last)
        host = np.zeros((4, stride), dtype=np.int32)
        host[1, real:] = self.dummy
        host[0, :real], host[1, :real], host[2, :real] = inputs.ids, inputs.slots, inputs.positions
        host[3, :rows] = inputs.last
        self.staging.send(host, self.static)
        if shared is not None and shared is not self._shared:
            assert self.shared_static is not None
            filled = np.zeros(len(self.shared_static), dtype=np.int32)
            for i, array in enumerate((shared.lengths, shared.chunks, shared.order, shared.items.reshape(-1))):
                filled[i * stride : i * stride + len(array)] = array
            self.staging.send(filled, self.shared_static)
            self._shared = shared
        self.graph.replay()
        return self.logits[:rows]


class Staging:
    """Pinned host memory that small arrays are copied through, a ring of buffers so that none is overwritten while a
    copy from it is under way.

    Args:
        device: to copy to and from.
        size: int32 numbers in a buffer.
    """

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._buffers = [torch.empty(size, dtype=torch.int32, pin_memory=True) for _ in range(_RING)]
            self._arrays = [b.numpy() for b in self._buffers]
            self._events = [_event() for _ in range(_RING)]
            self._now, self._at = 0, 0

    def send(self, array: Ints, target: torch.Tensor | None = None) -> torch.Tensor:
        """Starts copying an int32 array to the device."""
        if not self._cuda:
            tensor = torch.from_numpy(array.copy()).to(self._device)
            return tensor if target is None else target.copy_(tensor)
        count = array.size
        if self._at + count > len(self._buffers[self._now]):
            self._turn(count)
        place = slice(self._at, self._at + count)
        self._at += count
        self._arrays[self._now][place] = array.reshape(-1)
        source = self._buffers[self._now][place]
        if target is None:
            target = torch.empty(array.shape, dtype=torch.int32, device=self._device)
        target.view(-1).copy_(source, non_blocking=True)
        return target

    def send_all(self, *arrays: Ints) -> list[torch.Tensor]:
        """Several arrays [N_i] in one copy, each aligned so that Triton compiles one version of what reads them."""
        starts = np.cumsum([0, *(_aligned(len(array)) for array in arrays)])
        whole = np.zeros(int(starts[-1]), dtype=np.int32)
        for start, array in zip(starts.tolist(), arrays):
            whole[start : start + len(array)] = array
        sent = self.send(whole)
        return [sent[start : start + len(array)] for start, array in zip(starts.tolist(), arrays)]

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """Starts copying a tensor to the host; it is there when the event has come."""
        if not self._cuda:
            return tensor, None
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        done = _event()
        done.record()
        return host, done

    def _turn(self, count: int) -> None:
        """Goes on with the next buffer, once what was copied from it is through."""
        self._events[self._now].record()
        self._now, self._at = (self._now + 1) % _RING, 0
        self._events[self._now].synchronize()
        if count > len(self._buffers[self._now]):
            self._buffers[self._now] = torch.empty(2 * count, dtype=torch.int32, pin_memory=True)
            self._arrays[self._now] = self._buffers[self._now].numpy()


def _forbid(logits: torch.Tensor, words: torch.Tensor) -> None:
    """Rules out what the bits of int32 words [ceil(V / 32)] do not allow, in logits [V], as the draw's kernel does."""
    bits = (words.unsqueeze(1) >> torch.arange(32, device=words.device)) & 1
    logits.masked_fill_(bits.view(-1)[: len(logits)] == 0, float("-inf"))


def _token_sizes(most: int) -> list[int]:
    """Numbers of tokens, more than rows, that are worth a graph: padding is cheap where rows have several."""
    return [size for size in (8, 16, 32, *range(64, most, 64)) if size < most] + [most]


def _doubled(most: int) -> list[int]:
    """1, 2, 4 and so on, up to `most`: kernels are compiled for numbers of rows between powers of two."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def _aligned(count: int) -> int:
    """int32 numbers that fill up to 16 bytes."""
    return -(-count // 4) * 4


def _event(*, timed: bool = False) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call] # torch leaves it untyped
    return event


def _packed(sampling: SamplingTable) -> Ints:
    """The parameters of all slots and the dummy one, as `_views` reads them."""
    seed = sampling.seed.view(np.int32).reshape(-1, 2)
    floats = (np.where(sampling.greedy, np.float32(0), sampling.temperature), sampling.top_p, sampling.min_p)
    rows = [column.astype(np.float32).view(np.int32) for column in floats]
    rows.append(sampling.top_k.astype(np.int32))
    seeds = np.concatenate((seed, np.zeros((1, 2), dtype=np.int32)))
    return np.concatenate((seeds.reshape(-1), np.pad(np.stack(rows), ((0, 0), (0, 1))).reshape(-1)))


def _views(packed: torch.Tensor, slots: int) -> DeviceSampling:
    floats = packed[2 * slots : 5 * slots].view(torch.float32)
    return DeviceSampling(
        temperature=floats[:slots],
        top_p=floats[slots : 2 * slots],
        min_p=floats[2 * slots :],
        top_k=packed[5 * slots :],
        seed=packed[: 2 * slots].view(torch.int64),
    )
