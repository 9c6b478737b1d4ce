"""Torch twin of `kernels.softmax`: attention over parts of a sequence, and merging of parts. Scores
are in base 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionRules
from sglang_lite.runtime.kernels.kv_cache import gather_slots


class PartialAttention(NamedTuple):
    """Attention over some tokens of a sequence, not yet divided by the sum of weights.

    Attributes:
        acc: float32 [heads, head_dim], weighted values.
        highest: float32 [heads], highest score.
        total: float32 [heads], sum of weights; a weight is 2 to the power of its score less the
            highest one.
    """

    acc: torch.Tensor
    highest: torch.Tensor
    total: torch.Tensor


def attend_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    at: torch.Tensor,
    rules: AttentionRules,
    start: int = 0,
) -> PartialAttention:
    """Computes the attention of one token over the tokens in slots `at`, all of which it sees.

    Args:
        q: query [heads, head_dim].
        k, v: keys and values of a layer [kv_heads, slots, head_dim].
        at: int64 [N], token slots of the other tokens.
        rules: rules of the layer; its window and sinks are ignored.
        start: position of the first of these tokens.
    """
    keys, values = (
        gather_slots(x, at, torch.float32).repeat_interleave(len(q) // len(k), 0) for x in (k, v)
    )
    scores = torch.einsum("hd, hnd -> hn", q.float(), keys) * rules.scale
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    if rules.slopes is not None:
        positions = torch.arange(start, start + len(at), device=q.device)
        scores = scores + rules.slopes.unsqueeze(1) * positions
    scores = scores / math.log(2)
    highest = scores.amax(1)
    weights = torch.exp2(scores - highest.unsqueeze(1))
    return PartialAttention(torch.einsum("hn, hnd -> hd", weights, values), highest, weights.sum(1))


def merge_parts(parts: Sequence[PartialAttention]) -> torch.Tensor:
    """Merges the attention over all parts of a sequence: float32 [heads, head_dim]."""
    acc, highest, total = (torch.stack(each) for each in zip(*parts))
    weights = torch.exp2(highest - highest.amax(0))
    return (acc * weights.unsqueeze(2)).sum(0) / (total * weights).sum(0).unsqueeze(1)
