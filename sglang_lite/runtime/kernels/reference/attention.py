"""A torch twin of every kernel, with the kernel's signature. The CPU runs these; tests compare kernels with them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class KVScales:
    """What keys and values were divided by before they were stored: powers of two, which change no digit.

    Queries come to attention multiplied by the scale of the keys that they meet, so attention does without it. Its
    result it multiplies by the scale of the values. Scales are a model's, not a page's: whoever copies, shares or drops
    pages need not know of them.

    Attributes:
        k, v: per layer float32 [kv_heads].
    """

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every layer by token slot.

    Attributes:
        k, v: per layer [kv_heads, slots, head_dim]; a head's slots lie side by side, so that reading a sequence is
            one gather of rows and what it gives is a batch of matrices.
        scales: of keys and values in 8 bits; None: they are stored as they are.
    """

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    scales: KVScales | None = None

    @staticmethod
    def allocate(
        layers: int,
        kv_heads: int,
        slots: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: KVScales | None = None,
    ) -> KVCache:
        """All zeros: padding reads slots that nothing was stored in, and 0 x NaN would be NaN."""
        shape = (kv_heads, slots, head_dim)

        def tensor() -> torch.Tensor:
            if device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device)
            # numpy's zeros are mapped when they are first touched, torch's are written at once
            data = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
            return torch.from_numpy(data).view(dtype).view(shape)

        return KVCache(tuple(tensor() for _ in range(layers)), tuple(tensor() for _ in range(layers)), scales)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows with one new token each: the first `count` tokens of the batch.

    Attributes:
        read_at: token slots [count, longest], the new token's included; padded with any slot.
        lengths: [count].
        ragged: some row is shorter than the longest.
    """

    count: int
    read_at: torch.Tensor
    lengths: torch.Tensor
    ragged: bool


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

    def read(self, cache: torch.Tensor, first: int, dtype: torch.dtype) -> torch.Tensor:
        """The sequence's keys or values from position `first` on [kv_heads, length - first, head_dim]."""
        if isinstance(self.read_at, slice):
            return cache[:, self.read_at.start + first : self.read_at.stop].to(dtype)
        return _gather(cache, self.read_at[first:], dtype)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Who reads what in this step; the same for every layer."""

    store_at: torch.Tensor  # the slot of each new token [T]
    decode: DecodeRows | None
    extends: tuple[ExtendRow, ...]


def store_kv(
    cache: KVCache, layer: int, store_at: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """Writes the new tokens' keys and values [T, kv_heads, head_dim] to their slots.

    Returns:
        The queries q [T, heads, head_dim] as attention takes them.
    """
    if cache.scales is not None:
        k_scales, v_scales = cache.scales.k[layer], cache.scales.v[layer]
        q, k, v = by_kv_head(q, k_scales), by_kv_head(k, 1 / k_scales), by_kv_head(v, 1 / v_scales)
    for target, value in ((cache.k[layer], k), (cache.v[layer], v)):
        _indexable(target).index_copy_(1, store_at, _indexable(value.transpose(0, 1).to(target.dtype)))
    return q


def by_kv_head(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] times the scales [kv_heads] of its heads' KV heads, in the format of x."""
    return (x * scales.repeat_interleave(x.shape[1] // len(scales)).unsqueeze(1)).to(x.dtype)


def copy_kv(cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies keys and values of all layers between token slots, int64 [N] each; all are read before one is written."""
    for layer in map(_indexable, (*cache.k, *cache.v)):
        layer.index_copy_(1, target, layer.index_select(1, source))


def attention(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: AttentionPlan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of new tokens over their sequences, causal.

    Args:
        q: [T, heads, head_dim], as `store_kv` returns them.
        window: each token sees only the last `window` positions, itself included.
        softcap: scores become softcap * tanh(scores / softcap).

    Returns:
        [T, heads, head_dim].
    """
    k, v = cache.k[layer], cache.v[layer]
    out = torch.empty_like(q)
    rows = plan.decode
    if rows is not None:
        out[: rows.count] = attend(q[: rows.count], k, v, rows, scale=scale, window=window, softcap=softcap)
    for row in plan.extends:
        mine = q[row.start : row.end]
        out[row.start : row.end] = attend(mine, k, v, row, scale=scale, window=window, softcap=softcap)
    return out if cache.scales is None else by_kv_head(out, cache.scales.v[layer])


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: DecodeRows | ExtendRow,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of the tokens of `rows` alone, q [tokens, heads, head_dim], computed in the format of keys and values;
    where that has 8 bits, in that of q."""
    q = q if k.dtype.itemsize == 1 else q.to(k.dtype)
    if isinstance(rows, DecodeRows):
        return _decode(q, k, v, rows, scale, window, softcap)
    return _extend(q, k, v, rows, scale, window, softcap)


def _gather(cache: torch.Tensor, at: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values of token slots `at`, for products in `dtype`."""
    if cache.dtype == dtype:
        return cache.index_select(1, at)
    return _indexable(cache).index_select(1, at).view(cache.dtype).to(dtype)


def _indexable(x: torch.Tensor) -> torch.Tensor:
    """The same memory, in a format that torch can index by a tensor."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: DecodeRows,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    kv_heads, _, dim = k.shape
    count, longest = rows.read_at.shape
    flat = rows.read_at.reshape(-1)
    keys = _gather(k, flat, q.dtype).view(kv_heads * count, longest, dim)
    values = _gather(v, flat, q.dtype).view(kv_heads * count, longest, dim)
    group = q.shape[1] // kv_heads
    queries = q.view(count, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads * count, group, dim)
    scores = torch.bmm(queries, keys.transpose(1, 2)).float().mul_(scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if window is not None and longest <= window:
        window = None
    if rows.ragged or window is not None:
        at = torch.arange(longest, device=q.device)
        hidden = at >= rows.lengths.unsqueeze(1)
        if window is not None:
            hidden |= at < rows.lengths.unsqueeze(1) - window
        scores = scores.view(kv_heads, count, group, longest).masked_fill_(
            hidden.view(1, count, 1, longest), float("-inf")
        )
        scores = scores.view(kv_heads * count, group, longest)
    out = torch.bmm(scores.softmax(-1).to(values.dtype), values)
    return out.view(kv_heads, count, group, dim).transpose(0, 1).reshape(count, kv_heads * group, dim)


def _extend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row: ExtendRow,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    new, heads, dim = q.shape
    first = 0 if window is None else max(0, row.length - new - window + 1)  # what none of the new tokens sees
    keys, values = row.read(k, first, q.dtype), row.read(v, first, q.dtype)
    kv_heads, length, _ = keys.shape
    if window is not None and length <= window:
        window = None
    group = heads // kv_heads
    if new == 1 and window is None and softcap is None:
        # The heads of a group as rows of one product.
        out = F.scaled_dot_product_attention(q.view(1, kv_heads, group, dim), keys[None], values[None], scale=scale)
        return out.reshape(1, heads, dim)  # on a GPU it lies as q does
    # [kv_heads, group, …]: the heads of a group share keys and values without a copy.
    keys = keys.unsqueeze(1).expand(-1, group, -1, -1)
    values = values.unsqueeze(1).expand(-1, group, -1, -1)
    queries = q.view(new, kv_heads, group, dim).permute(1, 2, 0, 3)
    if new == length and window is None and softcap is None:
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale)
    else:
        at = torch.arange(length, device=q.device)
        position = at[length - new :].unsqueeze(1)
        visible = at <= position
        if window is not None:
            visible &= at > position - window
        if softcap is None:
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=visible, scale=scale)
        else:
            scores = torch.tanh((queries @ keys.transpose(-1, -2)).float() * (scale / softcap)) * softcap
            scores = scores.masked_fill_(~visible, float("-inf"))
            out = scores.softmax(-1).to(values.dtype) @ values
    return out.permute(2, 0, 1, 3).reshape(new, heads, dim)
