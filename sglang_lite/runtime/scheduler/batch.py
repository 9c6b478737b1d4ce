"""Batch of rows that one step computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.drafting.draft import Draft
from sglang_lite.runtime.kv_cache.page_copies import NO_COPIES, token_slots_to_copy
from sglang_lite.runtime.kv_cache.pages import Ints
from sglang_lite.runtime.kv_cache.prefix_cache import PrefixCache, SlotHandle
from sglang_lite.runtime.kv_cache.slot_table import SlotTable
from sglang_lite.runtime.kv_cache.state_pages import RowStates
from sglang_lite.runtime.requests.request import Request

NO_DRAFTS: Mapping[int, Draft] = {}

# request, start, end: positions start … end-1 are computed
Row: TypeAlias = tuple[Request, int, int]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one step. Decoding rows come first, then prefill rows with a single token. Rows with
    several tokens come last: other prefill rows, and rows with drafts.

    Attributes:
        step: number of the step.
        requests: request of each row.
        slots: slot of each row, int32 [R].
        epochs: epoch of each slot when the batch was planned, int32 [R].
        starts, ends: positions start … end-1 to compute, per row, int32 [R].
        decoding: number of decoding rows without drafts.
        singles: number of rows that compute one token, including the decoding rows.
        draws: bool [R]; True if the row reaches its request's last token, so that the next one is
            drawn.
        pending: bool [R]; True if the row's last token was drawn by a step whose result has not
            been read yet.
        started: requests that were given their slot since the last step.
        copies: int32 [2, C], source and destination token slots to copy before anything else.
        window_copies: like `copies`, in the layers with a window, if these have separate pages.
        streams: number of decoding rows whose requests stream.
        drafts: draft by row; its tokens are computed after the row's own.
        states: states that the rows read and write; None if the model has none.
    """

    step: int
    requests: tuple[Request, ...]
    slots: Ints
    epochs: Ints
    starts: Ints
    ends: Ints
    decoding: int
    singles: int
    draws: NDArray[np.bool_]
    pending: NDArray[np.bool_]
    started: tuple[Request, ...]
    copies: Ints
    window_copies: Ints = field(default_factory=lambda: NO_COPIES)
    streams: int = 0
    drafts: Mapping[int, Draft] = field(default_factory=dict)
    states: RowStates | None = None

    @property
    def draft_counts(self) -> Ints:
        """Number of drafted tokens of each row, int32 [R]."""
        counts: Ints = np.zeros(len(self.slots), dtype=np.int32)
        for row, draft in self.drafts.items():
            counts[row] = len(draft.tokens)
        return counts

    def handle_of_row(self, row: int) -> SlotHandle:
        """Returns the resources of a row's request."""
        handle = self.requests[row].handle
        assert handle is not None
        return handle

    @property
    def tokens(self) -> int:
        own = int((self.ends - self.starts).sum())
        return own + int(self.draft_counts.sum()) if self.drafts else own


def make_batch(
    store: PrefixCache,
    decoding: list[Request],
    chunks: list[Row],
    started: list[Request],
    drafts: Mapping[int, Draft] = NO_DRAFTS,
) -> Batch:
    """Builds the batch of the next step, and increments the store's step number.

    Args:
        store: pages, slots and radix tree.
        decoding: requests that compute their last token.
        chunks: rows of prefill.
        started: requests that were given their slot since the last step.
        drafts: drafts by id of their request.
    """
    store.step += 1
    table = store.table
    copies = store.pop_pending_copies()
    streams = count_streaming_requests(table, decoding)
    if drafts:
        chunks = chunks + [
            (r, int(table.computed[r.slot]), int(table.length[r.slot]))
            for r in decoding
            if r.id in drafts
        ]
        decoding = [r for r in decoding if r.id not in drafts]
    singles = [c for c in chunks if c[2] - c[1] == 1 and c[0].id not in drafts]
    chunks = singles + [c for c in chunks if c[2] - c[1] > 1 or c[0].id in drafts]
    requests = decoding + [c[0] for c in chunks]
    slots = np.array([r.slot for r in requests], dtype=np.int32)
    starts = table.computed[slots]
    ends = table.length[slots].copy()
    ends[len(decoding) :] = [c[2] for c in chunks]
    return Batch(
        step=store.step,
        requests=tuple(requests),
        slots=slots,
        epochs=table.epoch[slots],
        starts=starts,
        ends=ends,
        decoding=len(decoding),
        singles=len(decoding) + len(singles),
        draws=(ends == table.length[slots]) & (ends < table.limit[slots]),
        pending=ends > table.known[slots],
        started=tuple(r for r in started if r.handle is not None),
        copies=token_slots_to_copy(copies, store.page_size),
        window_copies=store.window_slots_to_copy(copies),
        streams=streams,
        drafts={row: drafts[r.id] for row, r in enumerate(requests) if r.id in drafts}
        if drafts
        else NO_DRAFTS,
        states=None
        if store.states is None
        else store.states.plan_step(slots, starts, ends, table.length[slots]),
    )


def count_streaming_requests(table: SlotTable, decoding: Iterable[Request]) -> int:
    """Returns the number of requests that stream."""
    if not table.streamed.any():  # avoids looking at each request
        return 0
    return sum(request.output.stream for request in decoding)
