"""Tokens of a step as host arrays, in the order in which a device plan needs them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang_lite.runtime.executor.step_record import StepRecord
from sglang_lite.runtime.kv_cache.pages import Ints

BLOCK_SIZES = (16, 64, 128)  # queries that a program of prefill_attention can have


@dataclass(frozen=True, slots=True)
class GpuInputs:
    """Tokens of a step in the order of a device plan, as host arrays.

    Attributes:
        ids, slots, positions: int32 [T], as in DevicePlan.
        rotary, limits: as in StepRecord.
        blocks: int32 [blocks, 4], as in DevicePlan.
        block_size: maximum number of tokens in a block.
        last: int32 [rows], index of each row's last token.
        decoding: number of tokens at the start of the step that are decoded: each attends to its
            slot's stored tokens up to itself.
        longest_uncached: as in DevicePlan.
        states: int32 [2, rows], places of the states that rows of one token read and write; [2, 0]
            if the model has none.
    """

    ids: Ints
    slots: Ints
    positions: Ints
    rotary: Ints
    limits: Ints
    blocks: Ints
    block_size: int
    last: Ints
    decoding: int
    longest_uncached: int = 0
    states: Ints = field(default_factory=lambda: _NO_STATES)

    @property
    def mrope_positions(self) -> Ints:
        """Time, row and column of each token for the rotary embedding, int32 [3, T]. All three are
        the token's position if the step sets none.
        """
        return (
            self.rotary
            if self.rotary.size
            else np.broadcast_to(self.positions, (3, len(self.positions)))
        )

    def arrays(self, threefold: bool) -> tuple[Ints, ...]:
        """Returns ids, slots, positions and flattened blocks, followed by `mrope_positions` if
        `threefold`.
        """
        whole = self.ids, self.slots, self.positions, self.blocks.reshape(-1)
        return (*whole, *self.mrope_positions) if threefold else whole


def build_gpu_inputs(
    record: StepRecord, max_decoded_tokens: int, *, max_token_reads: int, queries_per_read: int
) -> GpuInputs:
    """Returns the inputs of a step: decoded tokens first, then the tokens of all other rows in
    blocks.

    A row with several tokens (a short prompt, or tokens that a grammar forces) can be computed as
    that many decoding rows of one slot: all keys and values of a layer are stored before attention,
    and no token sees beyond its own position. A step with only decoding rows can run as a captured
    graph that includes the draws, and the tokens before a few new ones are read by more programs
    than in blocks.

    Args:
        record: the step.
        max_decoded_tokens: maximum number of tokens decoded in one step, or twice as many if no row
            has more than MAX_DECODED_ROW_TOKENS, and their token reads are few.
        max_token_reads: maximum number of token reads by decoded rows with several tokens; 0 if the
            step can't be captured.
        queries_per_read: number of tokens of a row with more than MAX_DECODED_ROW_TOKENS tokens
            that read the tokens before them together.
    """
    counts = record.ends - record.starts
    last = record.last
    tokens = record.ids, record.token_slots, record.positions, record.rotary, record.limits
    if record.singles == len(counts):
        states = np.stack((record.state_reads, record.state_writes))
        return GpuInputs(*tokens, _NO_BLOCKS, BLOCK_SIZES[0], last, len(counts), states=states)
    longest = int(counts.max())
    few = longest <= MAX_DECODED_ROW_TOKENS
    max_tokens = (
        max_decoded_tokens
        if longest <= _SHORT_ROW_TOKENS
        else min(_MAX_LONG_ROW_TOKENS, max_decoded_tokens)
    )
    decoded = (few and len(record.ids) <= max_decoded_tokens) or (
        len(record.ids) <= (2 * max_decoded_tokens if few else max_tokens)
        and _count_token_reads(record, queries_per_read) <= max_token_reads
    )
    if decoded and not record.limits.size:  # decoded tokens can't see later ones
        return GpuInputs(*tokens, _NO_BLOCKS, BLOCK_SIZES[0], last, len(record.ids))
    size = next((size for size in BLOCK_SIZES if longest <= size), BLOCK_SIZES[-1])
    blocks: list[tuple[int, int, int, int]] = []
    for i in range(record.singles, len(counts)):
        first = int(last[i] + 1 - counts[i])
        count = int(counts[i])
        slot = int(record.slots[i])
        start = int(record.starts[i])
        blocks += [
            (first + at, min(size, count - at), slot, start + at) for at in range(0, count, size)
        ]
    blocks.sort(key=lambda b: -b[3])  # blocks that read the most tokens first
    longest_uncached = 0 if record.starts[record.singles :].any() else longest
    return GpuInputs(
        *tokens, np.array(blocks, dtype=np.int32), size, last, record.singles, longest_uncached
    )


def _count_token_reads(record: StepRecord, queries_per_read: int) -> int:
    """Returns how many token reads it takes to decode the rows that have several new tokens.

    Each new token reads its row's new tokens up to itself, and all tokens before the new ones. In a
    row with more than MAX_DECODED_ROW_TOKENS new tokens, groups of `queries_per_read` new tokens
    read the earlier tokens together.
    """
    starts = record.starts[record.singles :].astype(np.int64)
    ends = record.ends[record.singles :]
    counts = ends - starts
    before = (
        np.where(counts > MAX_DECODED_ROW_TOKENS, -(-counts // queries_per_read), counts) * starts
    )
    return int((counts * (counts + 1) // 2 + before).sum())


MAX_DECODED_ROW_TOKENS = (
    # tokens of a row up to which decoding is cheaper, though each reads the row's keys and values
    16
)
# If no row is longer than the first number, a step is decoded up to `max_decoded_tokens` tokens; if
# one is, only up to the second number. On an H200, Qwen3-0.6B takes 3.3 ms to decode a row of 256
# tokens, and 4.7 ms after 8,000 cached ones. In blocks of a captured graph, it takes 2.9 and 5.9
# ms. For 400 tokens: 4.2 and 6.4 ms, in blocks 3.3 and 6.2 ms.
_SHORT_ROW_TOKENS = 64
_MAX_LONG_ROW_TOKENS = 256
# token reads times KV heads that rows with several tokens may need in a decoded step
MAX_TOKEN_READS = 1 << 20
_NO_BLOCKS: Ints = np.zeros((0, 4), dtype=np.int32)
_NOTHING: Ints = np.zeros(0, dtype=np.int32)
_NO_STATES: Ints = np.zeros((2, 0), dtype=np.int32)
NO_TOKENS = GpuInputs(
    ids=_NOTHING,
    slots=_NOTHING,
    positions=_NOTHING,
    rotary=_NOTHING,
    limits=_NOTHING,
    blocks=_NO_BLOCKS,
    block_size=BLOCK_SIZES[0],
    last=_NOTHING,
    decoding=0,
)  # inputs of a step without rows
