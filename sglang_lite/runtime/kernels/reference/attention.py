"""Attention over a KV cache, and the store of new keys and values before it, for an
`AttentionPlan`. The CPU runs these functions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionPlan,
    AttentionRules,
    DecodeRows,
    ExtendGroup,
    ExtendRow,
)
from sglang_lite.runtime.kernels.kv_cache import (
    KVCache,
    gather_slots,
    scale_by_kv_head,
    view_as_indexable,
)

_MAX_GROUPED_QUERIES = 8  # most new tokens of a row for which the heads of a group are one product
# least pairs of a new token and a position for plain products, if these are faster
_MIN_PRODUCT_PAIRS = 1 << 16
_MAX_PRODUCT_ROWS = 384  # most rows of a plain product: tokens times the heads of a group
# most scores of a plain product, so that they fit the processor's caches
_MAX_PRODUCT_SCORES = 1 << 22


def store_kv(
    cache: KVCache,
    layer: int,
    store_at: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """Writes the new tokens' keys and values [T, kv_heads, head_dim] to their token slots, scaled
    if the cache has scales.

    Returns:
        Queries q [T, heads, head_dim] for attention, scaled if the cache has scales.
    """
    if cache.scales is not None:
        k_scales = cache.scales.k[layer]
        v_scales = cache.scales.v[layer]
        q = scale_by_kv_head(q, k_scales)
        k = scale_by_kv_head(k, 1 / k_scales)
        v = scale_by_kv_head(v, 1 / v_scales)
    for target, value in ((cache.k[layer], k), (cache.v[layer], v)):
        view_as_indexable(target).index_copy_(
            1, store_at, view_as_indexable(value.transpose(0, 1).to(target.dtype))
        )
    return q


def attention(
    q: torch.Tensor, cache: KVCache, layer: int, plan: AttentionPlan, rules: AttentionRules
) -> torch.Tensor:
    """Computes the attention of new tokens over their sequences.

    Args:
        q: queries [T, heads, head_dim], as `store_kv` returns them.
        cache: KV cache, with the keys and values of the new tokens.
        layer: index of the layer.
        plan: plan of the step.
        rules: rules of the layer.

    Returns:
        [T, heads, size of a value].
    """
    k = cache.k[layer]
    v = cache.v[layer]
    if len(plan.extends) == 1 and plan.extends[0].end - plan.extends[0].start == len(q):
        out = attend_rows(q, k, v, plan.extends[0], rules)
    else:
        out = _attend_parts(q, k, v, plan, rules)
    return out if cache.scales is None else scale_by_kv_head(out, cache.scales.v[layer])


def _attend_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: AttentionPlan, rules: AttentionRules
) -> torch.Tensor:
    """Computes the attention of a batch with several rows, group by group."""
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    for each in plan.decode:
        own = rules.for_tokens(each.tokens)
        out[each.tokens] = attend_rows(q[each.tokens], k, v, each.rows, own)
    done: set[int] = set()
    for group in plan.groups:
        if rules.plain:
            out[group.tokens] = _extend_group(q[group.tokens], k, v, group, rules.scale)
            done.update(row.start for row in group.rows)
        elif (single := group.single) is not None:
            own = rules.for_tokens(single.tokens)
            out[single.tokens] = attend_rows(q[single.tokens], k, v, single.rows, own)
            done.update(row.start for row in group.rows if row.end - row.start == 1)
    for row in plan.extends:
        if row.start not in done:
            tokens = slice(row.start, row.end)
            out[tokens] = attend_rows(q[tokens], k, v, row, rules.for_tokens(tokens))
    return out


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rows: DecodeRows | ExtendRow,
    rules: AttentionRules,
) -> torch.Tensor:
    """Computes the attention of the tokens of `rows`. Their queries are q [tokens, heads,
    head_dim]. Computes in the data type of keys and values, or in that of q if keys have 8 bits.

    Returns:
        [tokens, heads, size of a value] in the data type of q.
    """
    queries = q if k.dtype.itemsize == 1 else q.to(k.dtype)
    if isinstance(rows, DecodeRows):
        return _decode(queries, k, v, rows, rules).to(q.dtype)
    return _extend(queries, k, v, rows, rules).to(q.dtype)


def _extend_group(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: ExtendGroup, scale: float
) -> torch.Tensor:
    """Computes the attention of a group's tokens, whose queries are q [T, heads, head_dim]. Uses
    one matmul over the shared tokens, another over the rest of each row, and one softmax over both.

    Returns:
        [T, heads, size of a value], in the data type of q.
    """
    dtype = q.dtype if k.dtype.itemsize == 1 else k.dtype
    count, heads, dim = q.shape
    kv_heads = k.shape[0]
    heads_per_kv = heads // kv_heads  # query heads that read the same keys
    queries = q.to(dtype).view(count, kv_heads, heads_per_kv, dim).permute(1, 2, 0, 3)
    rows = _GroupShapes(group, heads_per_kv)
    keys = gather_slots(k, group.own.view(-1), dtype)
    values = keys if v is k else gather_slots(v, group.own.view(-1), dtype)
    own = rows.to_flat(
        _scores(rows.to_padded(queries), rows.flatten_heads_and_rows(keys), scale), hides=True
    )
    first = group.rows[0]
    shared_keys = first.read_positions(k, 0, dtype, group.length)
    shared_values = shared_keys if v is k else first.read_positions(v, 0, dtype, group.length)
    out = queries.new_empty((kv_heads, heads_per_kv, count, shared_values.shape[2]))
    step = max(1, min(_MAX_PRODUCT_ROWS, _MAX_PRODUCT_SCORES // group.length) // heads_per_kv)
    for start in range(0, count, step):
        some = slice(start, min(start + step, count))
        for head in range(kv_heads):
            block = queries[head, :, some].reshape(1, -1, dim)
            shared = _scores(block, shared_keys[head : head + 1], scale)[0]
            weights = torch.cat((shared, own[head, :, some].flatten(0, 1)), 1).softmax(-1)
            out[head, :, some] = (weights[:, : group.length] @ shared_values[head]).view(
                heads_per_kv, -1, out.shape[3]
            )
            own[head, :, some] = weights[:, group.length :].view(heads_per_kv, -1, own.shape[3])
    out += rows.to_flat(rows.to_padded(own) @ rows.flatten_heads_and_rows(values))
    return out.permute(2, 0, 1, 3).reshape(count, heads, -1).to(q.dtype)


@dataclass(frozen=True, slots=True)
class _GroupShapes:
    """Conversion between two shapes of a group's tensors. Flat tensors hold one token after the
    other; padded tensors are a batch of matrices, one for each row and KV head.

    Attributes:
        group: rows that share a prefix.
        heads_per_kv: number of query heads that read the same keys.
    """

    group: ExtendGroup
    heads_per_kv: int

    def to_padded(self, flat: torch.Tensor) -> torch.Tensor:
        """Reshapes [kv_heads, heads_per_kv, T, N] to [kv_heads * rows, heads_per_kv * max_new, N]."""
        rows, max_new = self.group.padded.shape
        found = flat[:, :, self.group.padded.view(-1)].view(*flat.shape[:2], rows, max_new, -1)
        return found.transpose(1, 2).reshape(len(flat) * rows, self.heads_per_kv * max_new, -1)

    def to_flat(self, padded: torch.Tensor, *, hides: bool = False) -> torch.Tensor:
        """Reshapes [kv_heads * rows, heads_per_kv * max_new, N] to [kv_heads, heads_per_kv, T, N].

        Args:
            padded: tensor to reshape; overwritten with `hides`.
            hides: whether the tensor holds scores, which become -inf at positions that a token
                doesn't see.
        """
        rows, max_new = self.group.padded.shape
        found = padded.view(-1, rows, self.heads_per_kv, max_new, padded.shape[2])
        if hides:
            found.masked_fill_(self.group.masked.unsqueeze(1), float("-inf"))
        return found.transpose(1, 2).flatten(2, 3)[:, :, self.group.places]

    def flatten_heads_and_rows(self, own: torch.Tensor) -> torch.Tensor:
        """Reshapes keys or values [kv_heads, rows * longest, N] to [kv_heads * rows, longest, N]."""
        return own.view(-1, self.group.own.shape[1], own.shape[2])


def _decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: DecodeRows, rules: AttentionRules
) -> torch.Tensor:
    kv_heads, _, dim = k.shape
    count, longest = rows.read_at.shape
    flat = rows.read_at.reshape(-1)
    keys = gather_slots(k, flat, q.dtype).view(kv_heads * count, longest, dim)
    values = keys if v is k else gather_slots(v, flat, q.dtype).view(kv_heads * count, longest, -1)
    group = q.shape[1] // kv_heads
    queries = (
        q.view(count, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads * count, group, dim)
    )
    scores = _scores(queries, keys, rules.scale)
    window = rules.window
    masked = None
    if window is not None and longest <= window:
        window = None
    if rows.ragged or window is not None:
        at = torch.arange(longest, device=q.device)
        masked = at >= rows.lengths.unsqueeze(1)
        if window is not None:
            masked |= at < rules.first_visible(rows.lengths - 1).unsqueeze(1)
        masked = masked.view(1, count, 1, longest)
    scores = scores.view(kv_heads, count, group, longest)
    if rules.bias is not None:
        distances = rows.lengths.unsqueeze(1) - 1 - torch.arange(longest, device=q.device)
        bias = rules.bias_at(distances).view(count, kv_heads, group, longest)
        scores = scores.float() + bias.transpose(0, 1)
    if rules.sinks is not None and rules.sinks.ndim > 1:
        sinks = rules.sinks.view(count, kv_heads, group, 1)
        rules = replace(rules, sinks=sinks.transpose(0, 1))
    weights = rules.softmax(scores, masked, (kv_heads, 1, group, 1))
    out = torch.bmm(weights.reshape(kv_heads * count, group, longest).to(values.dtype), values)
    return out.view(kv_heads, count, group, -1).transpose(0, 1).reshape(count, kv_heads * group, -1)


def _extend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, row: ExtendRow, rules: AttentionRules
) -> torch.Tensor:
    new, heads, dim = q.shape
    scale = rules.scale
    window = rules.window
    explicit = rules.explicit
    # first position in any window
    first = 0
    if window is not None:
        begin = row.length - row.behind - new
        first = begin // window * window if rules.chunked else max(0, begin - window + 1)
    keys = row.read_positions(k, first, q.dtype)
    values = keys if v is k else row.read_positions(v, first, q.dtype)
    kv_heads, length, _ = keys.shape
    if window is not None and length <= window:
        window = None
    group = heads // kv_heads
    if new == 1 and window is None and not explicit:
        # Computes the heads of a group as rows of one product.
        out = F.scaled_dot_product_attention(
            q.view(1, kv_heads, group, dim), keys[None], values[None], scale=scale
        )
        return out.reshape(1, heads, -1)  # on a GPU, it has the strides of q
    # [kv_heads, group, …]: the heads of a group share keys and values without a copy.
    keys = keys.unsqueeze(1).expand(-1, group, -1, -1)
    values = values.unsqueeze(1).expand(-1, group, -1, -1)
    queries = q.view(new, kv_heads, group, dim).permute(1, 2, 0, 3)
    if (
        rules.causal
        and row.limits is None
        and window is None
        and not explicit
        and new * length >= _MIN_PRODUCT_PAIRS
        and products_are_faster(q)
    ):
        out = _attend_by_products(queries, keys[:, 0], values[:, 0], scale)
    elif new == length and row.limits is None and window is None and not explicit:
        out = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=rules.causal, scale=scale
        )
    else:
        at = torch.arange(length, device=q.device)
        position = at[length - row.behind - new :][:new].unsqueeze(1)
        visible = (
            at <= position
            if rules.causal
            else torch.ones(new, length, dtype=torch.bool, device=q.device)
        )
        if row.limits is not None:
            visible = at + first < row.limits.unsqueeze(1)
        if window is not None:
            visible &= at >= rules.first_visible(position)
            if not rules.causal:
                visible &= at < position + window
        if explicit:
            scores = (queries @ keys.transpose(-1, -2)).float() * scale
            if rules.bias is not None:
                bias = rules.bias_at(position - at).view(new, kv_heads, group, length)
                scores += bias.permute(1, 2, 0, 3)
            if rules.sinks is not None and rules.sinks.ndim > 1:
                sinks = rules.sinks.view(new, kv_heads, group, 1)
                rules = replace(rules, sinks=sinks.permute(1, 2, 0, 3))
            out = rules.softmax(scores, ~visible, (kv_heads, group, 1, 1)).to(values.dtype) @ values
        elif (
            new <= _MAX_GROUPED_QUERIES
        ):  # the heads of a group as rows of one product, with the same bits as separately
            queries = queries.reshape(1, kv_heads, group * new, dim)
            visible = visible.repeat(group, 1)
            out = F.scaled_dot_product_attention(
                queries, keys[None, :, 0], values[None, :, 0], attn_mask=visible, scale=scale
            ).view(kv_heads, group, new, -1)
        else:
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=visible, scale=scale
            )
    return out.permute(2, 0, 1, 3).reshape(new, heads, -1)


def products_are_faster(q: torch.Tensor) -> bool:
    """Returns whether two bfloat16 matmuls with a softmax between them are faster than torch's
    flash attention. They take about half the time on a CPU with bfloat16 instructions but no AMX.
    With AMX, flash attention has other kernels, which were not measured.
    """
    fast, amx = torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported  # noqa: SLF001 # torch has no public names for them
    return q.device.type == "cpu" and q.dtype == torch.bfloat16 and fast() and not amx()


def _attend_by_products(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Computes the causal attention of the last tokens of a sequence. Queries are [kv_heads, group,
    tokens, head_dim], keys and values [kv_heads, positions, head_dim]. Processes a few tokens at a
    time, over the positions that the last of them sees.

    Returns:
        [kv_heads, group, tokens, size of a value].
    """
    kv_heads, group, new, dim = queries.shape
    length = keys.shape[1]
    step = max(1, min(_MAX_PRODUCT_ROWS, _MAX_PRODUCT_SCORES // length) // group)
    masked = torch.full((step, step), float("-inf"), dtype=queries.dtype).triu_(1)
    out = queries.new_empty((*queries.shape[:3], values.shape[2]))
    for start in range(0, new, step):
        count = min(step, new - start)
        seen = length - new + start + count
        for head in range(kv_heads):
            block = queries[head, :, start : start + count].reshape(1, -1, dim)
            scores = _scores(block, keys[head : head + 1, :seen], scale)
            scores.view(group, count, seen)[..., -count:].add_(masked[:count, :count])
            weights = torch.softmax(scores, -1, out=scores)[0]
            out[head, :, start : start + count] = (weights @ values[head, :seen]).view(
                group, count, -1
            )
    return out


def _scores(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns scores [kv_heads, tokens, positions] of queries [kv_heads, tokens, head_dim], scaled
    before they are rounded.
    """
    scores = queries.new_empty((*queries.shape[:2], keys.shape[1]))
    return torch.baddbmm(scores, queries, keys.transpose(1, 2), beta=0, alpha=scale, out=scores)
