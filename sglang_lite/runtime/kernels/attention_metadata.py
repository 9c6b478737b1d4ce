"""Plans of the keys and values that a step writes and reads: `DevicePlan` for Triton,
`AttentionPlan` for the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.kv_cache import gather_slots
from sglang_lite.runtime.kernels.lora_weights import LoraStep
from sglang_lite.runtime.kernels.state_rows import StateWave

if TYPE_CHECKING:
    from sglang_lite.runtime.models.lora.cpu_step import CpuLoraStep


@dataclass(frozen=True, slots=True)
class AttentionRules:
    """How a layer's attention weighs positions.

    Attributes:
        scale: factor of the scores.
        window: if given, each token sees only the last `window` positions, itself included.
        softcap: if given, scores become softcap * tanh(scores / softcap).
        sinks: float32 [heads], an additional score of each head whose weight goes to no value; or
            [T, heads], one for each token of a step and each head; or None.
        causal: whether each token sees only itself and the tokens before it. Otherwise sequences
            must be complete in the batch, and each token sees all of its sequence, within `window`
            in both directions.
        chunked: whether each token sees the tokens of its own chunk instead: those from the last
            multiple of `window` on.
        slopes: float32 [heads]; each head's score of a token grows with the token's position by its
            slope (ALiBi, arXiv:2108.12409). Or None.
        bias: [T, heads, distances], added to the scaled scores: for each token of a step and each
            head, numbers for the positions at distances 0, 1, … before the token. Positions
            farther away get no bias. Or None.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    causal: bool = True
    chunked: bool = False
    slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def window_kind(self) -> int:
        """WINDOW of the kernels: 0 for no window, 1 for a sliding one, 2 for chunks."""
        return (self.window is not None) + self.chunked

    def first_visible(self, positions: torch.Tensor) -> torch.Tensor:
        """Returns the first position that tokens at these positions see; it may be negative."""
        assert self.window is not None
        if self.chunked:
            return positions // self.window * self.window
        return positions - (self.window - 1)

    @property
    def plain(self) -> bool:
        """True if each token sees all tokens before it, with unmodified scores."""
        return self.causal and self.window is None and not self.explicit

    @property
    def explicit(self) -> bool:
        """True if scores must be modified before or in the softmax."""
        modifies = self.softcap, self.sinks, self.slopes, self.bias
        return any(each is not None for each in modifies)

    def for_tokens(self, tokens: torch.Tensor | slice) -> AttentionRules:
        """Returns the rules for some of a step's tokens."""
        bias = None if self.bias is None else self.bias[tokens]
        sinks = self.sinks
        if sinks is not None and sinks.ndim > 1:
            sinks = sinks[tokens]
        if bias is None and sinks is self.sinks:
            return self
        return replace(self, bias=bias, sinks=sinks)

    def bias_at(self, distances: torch.Tensor) -> torch.Tensor:
        """Looks up the bias of scores, float32 [T, heads, positions].

        Args:
            distances: distances of the tokens from positions, integers [T, positions]. The bias is
                0 for negative distances, and for those beyond the last one in `bias`.
        """
        assert self.bias is not None
        extent = self.bias.shape[2]
        at = distances.clamp(0, extent - 1).unsqueeze(1).expand(-1, self.bias.shape[1], -1)
        outside = (distances < 0) | (distances >= extent)
        return self.bias.gather(2, at).float().masked_fill_(outside.unsqueeze(1), 0.0)

    def softmax(
        self, scores: torch.Tensor, masked: torch.Tensor | None, heads: tuple[int, ...]
    ) -> torch.Tensor:
        """Returns the attention weights for scaled scores [kv_heads, …, positions].

        Args:
            scores: scaled scores; overwritten.
            masked: mask, True for positions that a token doesn't see; None if it sees all.
            heads: shape of the scores, with 1 for all dimensions that are not heads.
        """
        if self.explicit:
            scores = scores.float()
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        if self.slopes is not None:
            at = torch.arange(scores.shape[-1], dtype=torch.float32, device=scores.device)
            scores = scores + self.slopes.view(heads) * at
        if masked is not None:
            scores = scores.masked_fill_(masked, float("-inf"))
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.view(heads) if self.sinks.ndim == 1 else self.sinks
        sinks = sinks.expand(*scores.shape[:-1], 1)
        return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of decoding rows whose first tokens are in the same pages, which are read once per
    group.

    Attributes:
        lengths: int32 [rows], number of tokens of each row in a shared prefix, 0 for none.
        chunks: int32 [rows], number of chunks of the row's prefix.
        order: int32 [rows], rows sorted by group.
        items: int32 [items, 6]: first index into `order`, number of rows, slot whose pages are
            read, first token, end, index of the chunk. An item with 0 rows is unused.
        max_chunks: maximum number of chunks of any row.
    """

    lengths: torch.Tensor
    chunks: torch.Tensor
    order: torch.Tensor
    items: torch.Tensor
    max_chunks: int


@dataclass(frozen=True, slots=True)
class Partials:
    """Buffers for partial attention results that are still to be merged. All layers share them.
    They are float32 unless noted otherwise.

    Attributes:
        acc: weighted values of each part, not yet divided by the sum of weights.
        ml: highest score (base 2) and sum of weights of each part, interleaved.
        counters: int32, number of finished parts by row and KV head; zero between kernels.
        prefix_acc, prefix_ml: the same as `acc` and `ml` for chunks of shared prefixes.
    """

    acc: torch.Tensor
    ml: torch.Tensor
    counters: torch.Tensor
    prefix_acc: torch.Tensor
    prefix_ml: torch.Tensor


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Work items for a step's decoding rows: which tokens each program reads.

    Attributes:
        items: int32 [items, 4]: row (-1 for an unused item), first token, end, slot. One program
            reads the tokens of an item; the items of a row are contiguous.
        rows: int32 [rows, 2]: first item of the row, and number of its items.
        partials: buffers for the items' results.
    """

    items: torch.Tensor
    rows: torch.Tensor
    partials: Partials


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """Positions of a step's tokens for the rotary embedding, if they differ from the positions in
    the cache.

    Attributes:
        at: int32 [3, T], time, row and column of each token; contiguous in T.
        axes: int32 [rotary size], which of the three rotates each element of a head.
    """

    at: torch.Tensor
    axes: torch.Tensor


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """Batch of a step, as tensors on the device.

    Attributes:
        ids: int32 [T]; -1 if the previous step draws the token, which is then `last_tokens[slot]`;
            -2 - r for row r of images' features.
        slots: int32 [T], slot of each token.
        positions: int32 [T], position of each token in its sequence.
        last_tokens: int32 [slots], last drawn token of each slot.
        page_table: int32 [slots, pages], copy of the slot table's pages, and a row of the dummy
            page for padding.
        page_size: tokens in a page.
        decoding: number of decoded tokens, the first ones of the batch.
        shared: prefixes that are read once for several rows, or None.
        blocks: int32 [blocks, 4], for the remaining tokens: first token in the batch, number of
            tokens, slot, first position.
        block_size: maximum number of tokens in a block.
        separate: True if no two decoding tokens share a slot, except the dummy slot.
        longest_uncached: maximum number of tokens of a row in blocks if all these rows begin in
            this step, so that they see no cached tokens; else 0.
        window_table: page table of the layers with a window, if they have their own pages: pages
            outside the window are any valid ones.
        lora: adapters of the slots; None if no token has one.
        rotary: positions that rotate queries and keys, of a model that has three a token; None if
            `positions` do.
        limits: int32 [T], number of tokens that each token in blocks sees; None if it sees those up
            to itself.
        features: whether a token may stand for features.
        rows: [T, hidden_size] output of the layers before this rank's, which other ranks computed;
            overwritten. None to begin with embeddings.
        states: how the step's rows read and write the states of recurrent layers; empty if the
            model has none.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    last_tokens: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    decoding: int
    shared: SharedPrefixes | None
    blocks: torch.Tensor
    block_size: int
    separate: bool = False
    longest_uncached: int = 0
    window_table: torch.Tensor | None = None
    lora: LoraStep | None = None
    rotary: RotaryPositions | None = None
    limits: torch.Tensor | None = None
    features: bool = True
    rows: torch.Tensor | None = None
    states: tuple[StateWave, ...] = ()

    @property
    def token_slots(self) -> torch.Tensor:
        """Slot of each token in the KV cache, int64 [T]. Padding has slots in the dummy page."""
        at = self.positions.long()
        pages = self.page_table[self.slots.long(), at // self.page_size].long()
        return pages * self.page_size + at % self.page_size

    def in_layer(self, window: int | None) -> DevicePlan:
        """Returns the plan for layers with this window, which may have their own page table."""
        if window is None or self.window_table is None:
            return self
        return replace(self, page_table=self.window_table, window_table=None)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows with one new token each that are computed together.

    Attributes:
        read_at: token slots [rows, longest] of each sequence, the new token's included; padded with
            any valid slot.
        lengths: length of each sequence [rows].
        ragged: True if some row is shorter than the longest.
    """

    read_at: torch.Tensor
    lengths: torch.Tensor
    ragged: bool


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding rows of similar length, and the indices of their tokens in the batch.

    Attributes:
        tokens: indices of the tokens in the batch: int64 [rows], or a slice if contiguous.
        rows: reads of the rows.
    """

    tokens: torch.Tensor | slice
    rows: DecodeRows


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """Consecutive new tokens at the end of one sequence.

    Attributes:
        start, end: range of the tokens in the batch.
        read_at: token slots [length] of the whole sequence, or a slice if they are contiguous and
            in order, so that reading them makes no copy.
        limits: int64 [end - start], number of positions that each token sees; None if it sees those
            up to itself.
        behind: number of positions after the last new token that are also read.
    """

    start: int
    end: int
    read_at: torch.Tensor | slice
    limits: torch.Tensor | None = None
    behind: int = 0

    @property
    def length(self) -> int:
        return (
            self.read_at.stop - self.read_at.start
            if isinstance(self.read_at, slice)
            else len(self.read_at)
        )

    def slots(self, first: int) -> torch.Tensor:
        """Returns the token slots, int64, of positions from `first` on."""
        if isinstance(self.read_at, slice):
            return torch.arange(self.read_at.start + first, self.read_at.stop)
        return self.read_at[first:].long()

    def read_positions(
        self, cache: torch.Tensor, first: int, dtype: torch.dtype, end: int | None = None
    ) -> torch.Tensor:
        """Returns the keys or values [kv_heads, positions, head_dim] of the positions from `first`
        up to, but excluding, `end`, which is the sequence's end by default.
        """
        end = self.length if end is None else end
        if isinstance(self.read_at, slice):
            return cache[:, self.read_at.start + first : self.read_at.start + end].to(dtype)
        return gather_slots(cache, self.read_at[first:end], dtype)


@dataclass(frozen=True, slots=True)
class ExtendGroup:
    """Rows whose sequences begin with the same token slots, which are read once for all rows.

    Attributes:
        rows: rows that are computed together.
        length: number of shared tokens, none of which is new.
        tokens: int64 [T], indices of the rows' new tokens in the batch, row by row.
        own: int64 [rows, longest], token slots of each row after the shared ones; padded with the
            row's first one.
        padded: int64 [rows, max_new], each row's new tokens as indices into `tokens`; padded with
            the row's last one.
        places: int64 [T], index of each of `tokens` in flattened `padded`.
        masked: bool [rows, max_new, longest], True for the positions of `own` that a new token
            doesn't see.
    """

    rows: tuple[ExtendRow, ...]
    length: int
    tokens: torch.Tensor
    own: torch.Tensor
    padded: torch.Tensor
    places: torch.Tensor
    masked: torch.Tensor

    @classmethod
    def from_rows(cls, rows: tuple[ExtendRow, ...], length: int) -> ExtendGroup:
        """Builds the group of rows that share their first `length` tokens."""
        counts = torch.tensor([row.end - row.start for row in rows])
        lengths = torch.tensor([row.length - length for row in rows])
        max_new = int(counts.max())
        longest = int(lengths.max())
        own = torch.stack(
            [F.pad(row.slots(length), (0, longest - row.length + length), value=-1) for row in rows]
        )
        new = torch.arange(max_new)
        first = counts.cumsum(0) - counts
        is_token = new < counts.unsqueeze(1)
        return cls(
            rows=rows,
            length=length,
            tokens=torch.cat([torch.arange(row.start, row.end) for row in rows]),
            own=torch.where(own < 0, own[:, :1], own),
            padded=first.unsqueeze(1) + torch.minimum(new, counts.unsqueeze(1) - 1),
            places=is_token.flatten().nonzero().squeeze(1),
            masked=torch.arange(longest) > (lengths - counts).view(-1, 1, 1) + new.view(1, -1, 1),
        )

    @property
    def single(self) -> DecodeGroup | None:
        """Rows with one new token, as decoding rows; None if there are none. For layers that can't
        read the shared tokens once for all rows.
        """
        at = [i for i, row in enumerate(self.rows) if row.end - row.start == 1]
        if not at:
            return None
        lengths = torch.tensor([self.rows[i].length for i in at])
        shared = self.rows[0].slots(0)[: self.length].expand(len(at), -1)
        read_at = torch.cat((shared, self.own[at]), 1)
        rows = DecodeRows(read_at, lengths, ragged=bool((lengths != read_at.shape[1]).any()))
        return DecodeGroup(torch.tensor([self.rows[i].start for i in at]), rows)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A step's reads and writes in the KV cache, the same for every layer.

    Attributes:
        store_at: int64 [T], token slot of each new token.
        decode: groups of rows with one new token that are computed together.
        extends: all other rows.
        groups: groups of `extends` that share a prefix, where reading it once saves time.
        windowed: the same plan with the token slots of layers with a window, if they have pages of
            their own: slots outside the window are any valid ones.
        lora: adapters of the step's tokens, or None if none has one.
        both_ways: whether some tokens see later tokens.
        previous: int64 [T, N], token slots of the N tokens before each one in its sequence, the
            nearest first; -1 before the sequence's beginning. None if no layer needs them.
        states: how the step's rows read and write the states of recurrent layers; empty if the
            model has none.
    """

    store_at: torch.Tensor
    decode: tuple[DecodeGroup, ...]
    extends: tuple[ExtendRow, ...]
    groups: tuple[ExtendGroup, ...] = ()
    windowed: AttentionPlan | None = None
    lora: CpuLoraStep | None = None
    both_ways: bool = False
    previous: torch.Tensor | None = None
    states: tuple[StateWave, ...] = ()

    def in_layer(self, window: int | None) -> AttentionPlan:
        """Returns the plan for layers with this window."""
        return self if window is None or self.windowed is None else self.windowed

    def with_previous(self, count: int) -> AttentionPlan:
        """Returns the plan with the `count` tokens before each one, for the layers with a window."""
        if self.windowed is not None:
            return replace(self, windowed=self.windowed.with_previous(count))
        back = torch.arange(1, count + 1)
        previous = self.store_at.new_full((len(self.store_at), count), -1)
        for row in self.extends:
            end = row.length - row.behind
            start = end - (row.end - row.start)
            first = max(start - count, 0)
            slots = row.slots(first)
            at = torch.arange(start, end).unsqueeze(1) - back
            read = slots[(at - first).clamp(min=0)]
            previous[row.start : row.end] = torch.where(at < 0, -1, read)
        for group in self.decode:
            at = group.rows.lengths.unsqueeze(1) - 1 - back
            read = group.rows.read_at.long().gather(1, at.clamp(min=0))
            previous[group.tokens] = torch.where(at < 0, -1, read)
        return replace(self, previous=previous)
