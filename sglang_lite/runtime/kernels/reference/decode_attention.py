"""Torch twin of `kernels.decode_attention`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import (
    AttentionRules,
    DecodeWork,
    DevicePlan,
    SharedPrefixes,
)
from sglang_lite.runtime.kernels.kv_cache import KVCache, scale_by_kv_head
from sglang_lite.runtime.kernels.reference.page_table import token_slots
from sglang_lite.runtime.kernels.reference.prefix_attention import prefix_partials
from sglang_lite.runtime.kernels.reference.softmax import (
    PartialAttention,
    attend_tokens,
    merge_parts,
)


def split_work(
    positions: torch.Tensor,
    slots: torch.Tensor,
    shared: SharedPrefixes | None,
    work: torch.Tensor,
    row_work: torch.Tensor,
    *,
    min_tokens: int,
    concurrent_programs: int = 0,
    round_up: bool = False,
) -> None:
    starts = [0] * len(positions) if shared is None else shared.lengths.tolist()
    ends = (positions + 1).tolist()
    tokens = sum(ends) - sum(starts[: len(ends)])
    chunk = max(-(-tokens // (len(work) - len(ends))), min_tokens)
    if concurrent_programs:
        chunk = max(chunk, min(-(-tokens // concurrent_programs), 1024))
    items: list[tuple[int, int, int, int]] = []
    for row, (slot, start, end) in enumerate(zip(slots.tolist(), starts, ends)):
        half = chunk - 1 if round_up else chunk // 2
        count = max((end - start + half) // chunk, 1)
        share = -(-(end - start) // count)
        step = -(-share // 64) * 64  # a multiple of 64 tokens
        pieces = [(row, at, min(at + step, end), slot) for at in range(start, end, step)]
        row_work[row] = torch.tensor([len(items), len(pieces)])
        items += pieces
    work[:] = torch.tensor([-1, 0, 0, 0])
    work[: len(items)] = torch.tensor(items)


def decode_attention(
    q: torch.Tensor,
    cache: KVCache,
    layer: int,
    plan: DevicePlan,
    work: DecodeWork,
    out: torch.Tensor,
    rules: AttentionRules,
) -> None:
    k = cache.k[layer]
    v = cache.v[layer]
    for row in range(plan.decoding):
        first, count = work.rows[row].tolist()
        parts: list[PartialAttention] = []
        for _, start, end, slot in work.items[first : first + count].tolist():
            if rules.window is not None:
                start = max(start, int(rules.first_visible(plan.positions[row])))
            if start < end:
                at = token_slots(plan, slot, torch.arange(start, end, device=q.device))
                parts.append(attend_tokens(q[row], k, v, at, rules, start))
        if plan.shared is not None:
            max_chunks = plan.shared.max_chunks
            pieces = range(row * max_chunks, row * max_chunks + int(plan.shared.chunks[row]))
            parts += [prefix_partials(work.partials, piece, q.shape[1]) for piece in pieces]
        out[row] = merge_parts(parts)
    if cache.scales is not None:
        rows = out[: plan.decoding]
        rows.copy_(scale_by_kv_head(rows, cache.scales.v[layer]))
