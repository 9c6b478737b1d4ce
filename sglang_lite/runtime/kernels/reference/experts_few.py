"""Torch twin of `kernels.experts_few`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.experts_few import SCALED_BLOCK
from sglang_lite.runtime.kernels.reference.activation import gated_pair


def experts_gate_up_few(
    x: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    activation: str,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float = 0.0,
    partial: bool = False,
) -> torch.Tensor:
    experts = ids.flatten().long()
    rows = x.float().repeat_interleave(ids.shape[1], 0)
    gate, up = _product(rows, weight, experts, scales, bias).chunk(2, -1)
    return gated_pair(gate, up, alpha, limit, activation).to(x.dtype)


def experts_down_few(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    base: torch.Tensor | None = None,
    partial: bool = False,
) -> torch.Tensor:
    y = _product(hidden.float(), weight, ids.flatten().long(), scales, bias)
    total = (y.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(1)
    return (total if base is None else total + base.float()).to(hidden.dtype)


def _product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    experts: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Multiplies each row of [P, K] by the matrix of its expert, experts [P]. Returns float32 [P,
    N].
    """
    y = rows.new_zeros((len(rows), weight.shape[1]))
    here = experts < len(weight)  # others, which come with `partial`, give zeros
    for pair in here.nonzero()[:, 0].tolist():
        y[pair] = decode_expert(weight, scales, int(experts[pair])) @ rows[pair]
    if bias is not None:
        y[here] += bias.float()[experts[here]]
    return y


def decode_expert(weight: torch.Tensor, scales: torch.Tensor | None, expert: int) -> torch.Tensor:
    """Returns an expert's matrix as float32 [N, K]."""
    matrix = weight[expert].float()
    if scales is None:
        return matrix
    by_row = scales[expert].repeat_interleave(SCALED_BLOCK, 0)
    return matrix * by_row.repeat_interleave(SCALED_BLOCK, 1)
