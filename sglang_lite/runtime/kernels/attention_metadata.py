"""Plans of the keys and values that a step writes and reads: `DevicePlan` for Triton, `AttentionPlan` for the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.kv_cache import gather


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of decoding rows whose first tokens lie in the same pages: those are read once a group.

    Attributes:
        lengths: int32 [rows]: tokens of each row that are covered, 0 for most.
        chunks: int32 [rows]: in how many pieces.
        order: int32 [rows]: rows, those of a group side by side.
        items: int32 [items, 6]: first index into `order`, count of rows, slot that has the pages, first token, end,
            number of the piece. A count of 0: nothing to do.
        most_chunks: most pieces of any row.
    """

    lengths: torch.Tensor
    chunks: torch.Tensor
    order: torch.Tensor
    items: torch.Tensor
    most_chunks: int


@dataclass(frozen=True, slots=True)
class Partials:
    """Room for results of parts of a row's attention, until they are merged: float32, shared by all layers.

    Attributes:
        acc: weighted values, each part's divided by nothing yet.
        ml: the highest score (base 2) and the sum of weights, side by side.
        counters: int32, zero between kernels: finished parts by row and KV head.
    """

    acc: torch.Tensor
    ml: torch.Tensor
    counters: torch.Tensor
    prefix_acc: torch.Tensor
    prefix_ml: torch.Tensor


@dataclass(frozen=True, slots=True)
class Work:
    """Shares of programs in the tokens that a step's decoding rows read.

    Attributes:
        items: int32 [items, 4]: row (-1: none), first token, end, slot. An item's tokens are read by one program, and a
            row's items lie side by side.
        rows: int32 [rows, 2]: a row's first item, and how many it has.
        partials: room for what is merged.
    """

    items: torch.Tensor
    rows: torch.Tensor
    partials: Partials


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """A step's batch, as tensors on the device.

    Attributes:
        ids: int32 [T], -1 where the step before has drawn the token: then it is `drawn[slot]`.
        slots: int32 [T], of the slot table.
        positions: int32 [T].
        drawn: int32 [slots]: each slot's last token.
        page_table: int32 [slots, pages]: what the slot table has, and a row of the dummy page for padding.
        page_size: tokens in a page.
        decoding: rows with one token, the first of the batch.
        shared: prefixes that are read once for several rows.
        blocks: int32 [blocks, 4], for rows with several tokens: first token in the batch, count, slot, first position.
        block_size: most tokens in such a block.
        separate: no two decoding tokens are of one slot, but the dummy's.
        fresh: where all rows with several tokens begin in this step, so that they see no others: most tokens of any.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    drawn: torch.Tensor
    page_table: torch.Tensor
    page_size: int
    decoding: int
    shared: SharedPrefixes | None
    blocks: torch.Tensor
    block_size: int
    separate: bool = False
    fresh: int = 0


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows with one new token each, which are computed together.

    Attributes:
        read_at: token slots [rows, longest], the new token's included; padded with any slot.
        lengths: [rows].
        ragged: some row is shorter than the longest.
    """

    read_at: torch.Tensor
    lengths: torch.Tensor
    ragged: bool


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decoding rows of about one length, with their places in the batch.

    Attributes:
        tokens: of the batch: int64 [rows], or a slice where they lie side by side.
    """

    tokens: torch.Tensor | slice
    rows: DecodeRows


@dataclass(frozen=True, slots=True)
class ExtendRow:
    """A row of new tokens: tokens start … end of the batch, the last ones of their sequence.

    Attributes:
        read_at: token slots of the whole sequence [length]; a slice where they lie side by side and in order, so that
            reading them is no copy.
    """

    start: int
    end: int
    read_at: torch.Tensor | slice

    @property
    def length(self) -> int:
        return self.read_at.stop - self.read_at.start if isinstance(self.read_at, slice) else len(self.read_at)

    def slots(self, first: int) -> torch.Tensor:
        """Token slots of positions from `first` on, int64."""
        if isinstance(self.read_at, slice):
            return torch.arange(self.read_at.start + first, self.read_at.stop)
        return self.read_at[first:].long()

    def read(self, cache: torch.Tensor, first: int, dtype: torch.dtype, end: int | None = None) -> torch.Tensor:
        """The sequence's keys or values of positions first … end-1 (to its end) [kv_heads, positions, head_dim]."""
        end = self.length if end is None else end
        if isinstance(self.read_at, slice):
            return cache[:, self.read_at.start + first : self.read_at.start + end].to(dtype)
        return gather(cache, self.read_at[first:end], dtype)


@dataclass(frozen=True, slots=True)
class ExtendGroup:
    """Rows whose sequences begin with the same token slots: those are read once for all of them.

    Attributes:
        rows: that are computed together.
        length: how many tokens they share, none of them new.
        tokens: int64 [T]: their new tokens in the batch, row by row.
        own: int64 [rows, longest]: token slots of what each has behind that; padded with its first one.
        padded: int64 [rows, most]: each row's new tokens, as indices into `tokens`; padded with its last one.
        places: int64 [T]: of `tokens` in `padded`, as if that were flat.
        hidden: bool [rows, most, longest]: positions of `own` that a new token does not see.
    """

    rows: tuple[ExtendRow, ...]
    length: int
    tokens: torch.Tensor
    own: torch.Tensor
    padded: torch.Tensor
    places: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def of(cls, rows: tuple[ExtendRow, ...], length: int) -> ExtendGroup:
        """The group of rows that share `length` tokens."""
        counts = torch.tensor([row.end - row.start for row in rows])
        lengths = torch.tensor([row.length - length for row in rows])
        most, longest = int(counts.max()), int(lengths.max())
        own = torch.stack([F.pad(row.slots(length), (0, longest - row.length + length), value=-1) for row in rows])
        new = torch.arange(most)
        first = counts.cumsum(0) - counts
        is_token = new < counts.unsqueeze(1)
        return cls(
            rows=rows,
            length=length,
            tokens=torch.cat([torch.arange(row.start, row.end) for row in rows]),
            own=torch.where(own < 0, own[:, :1], own),
            padded=first.unsqueeze(1) + torch.minimum(new, counts.unsqueeze(1) - 1),
            places=is_token.flatten().nonzero().squeeze(1),
            hidden=torch.arange(longest) > (lengths - counts).view(-1, 1, 1) + new.view(1, -1, 1),
        )

    @property
    def single(self) -> DecodeGroup | None:
        """The rows with one new token as decoding rows, for layers that can't read what is shared once."""
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
    """Reads and writes of a step in the KV cache; the same for every layer.

    Attributes:
        store_at: int64 [T]: the token slot of each new token.
        decode: rows with one new token, those that are computed together.
        extends: the other rows.
        groups: of those, where it pays.
    """

    store_at: torch.Tensor
    decode: tuple[DecodeGroup, ...]
    extends: tuple[ExtendRow, ...]
    groups: tuple[ExtendGroup, ...] = ()
