"""Torch twin of `kernels.experts_tiled`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows
from sglang_lite.runtime.kernels.experts_order import ExpertBlocks
from sglang_lite.runtime.kernels.reference.activation import gated_pair
from sglang_lite.runtime.kernels.reference.experts_few import decode_expert


def experts_gate_up(
    x: torch.Tensor | EightBitRows,
    weight: torch.Tensor,
    blocks: ExpertBlocks,
    top: int,
    activation: str,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float = 0.0,
) -> torch.Tensor:
    values, dtype = _decode_rows(x)
    out = torch.empty((len(blocks.pairs), weight.shape[1] // 2), dtype=dtype, device=values.device)
    for rows, pairs, expert in _rows_by_block(blocks, len(values) * top):
        y = values[pairs // top] @ decode_expert(weight, scales, expert).T
        if bias is not None:
            y = y + bias[expert].float()
        gate, up = y.chunk(2, -1)
        out[rows] = gated_pair(gate, up, alpha, limit, activation).to(dtype)
    return out


def experts_down(
    hidden: torch.Tensor | EightBitRows,
    weight: torch.Tensor,
    blocks: ExpertBlocks,
    weights: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    partial: bool = False,
) -> torch.Tensor:
    values, dtype = _decode_rows(hidden)
    out = torch.zeros((weights.numel(), weight.shape[1]), device=values.device)  # by pair
    for rows, pairs, expert in _rows_by_block(blocks, weights.numel()):
        y = values[rows] @ decode_expert(weight, scales, expert).T
        if bias is not None:
            y = y + bias[expert].float()
        out[pairs] = y * weights.flatten()[pairs].unsqueeze(-1)
    parts = out.view(*weights.shape, -1).transpose(0, 1).contiguous()
    if base is not None:
        parts[0] += base.float()
    return parts.to(dtype)


def experts_sum(y: torch.Tensor) -> torch.Tensor:
    return y.float().sum(0).to(y.dtype)


def _decode_rows(x: torch.Tensor | EightBitRows) -> tuple[torch.Tensor, torch.dtype]:
    """Returns x in float32, and the data type in which results are stored."""
    if isinstance(x, EightBitRows):
        return x.values[: x.rows].float() * x.scales[: x.rows].unsqueeze(-1), torch.bfloat16
    return x.float(), x.dtype


def _rows_by_block(
    blocks: ExpertBlocks, count: int
) -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    """Returns three things for each used block: its rows that hold a pair, these pairs, and its
    expert.
    """
    found = []
    for i, expert in enumerate(blocks.experts.tolist()):
        if expert >= 0:
            rows = torch.arange(i * blocks.size, (i + 1) * blocks.size, device=blocks.pairs.device)
            rows = rows[blocks.pairs[rows] < count]
            found.append((rows, blocks.pairs[rows].long(), expert))
    return found
