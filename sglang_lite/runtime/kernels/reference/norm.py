"""Torch twin of `kernels.norm`."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.all_reduce import Peers
from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows, Scales
from sglang_lite.runtime.kernels.reference.all_reduce import exchange
from sglang_lite.runtime.kernels.reference.eight_bits import apply_scales, quantise_rows


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scales: Scales | None = None,
    ranks: Peers | None = None,
) -> torch.Tensor:
    return _normalise(_sum_over_ranks(apply_scales(x, scales), weight, ranks), weight, eps).to(
        x.dtype
    )


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scales: Scales | None = None,
    ranks: Peers | None = None,
) -> torch.Tensor:
    _add(x, residual, weight, scales, ranks)
    return _normalise(residual.float(), weight, eps).to(residual.dtype)


def norm_eight(
    x: torch.Tensor, weight: torch.Tensor, eps: float, kind: torch.dtype
) -> EightBitRows:
    return quantise_rows(_normalise(x.float(), weight, eps), kind)


def add_norm_eight(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scales: Scales | None,
    kind: torch.dtype,
    ranks: Peers | None = None,
    *,
    unquantised: bool = False,
) -> EightBitRows:
    _add(x, residual, weight, scales, ranks)
    normed = _normalise(residual.float(), weight, eps)
    return replace(
        quantise_rows(normed, kind), unquantised=normed.to(residual.dtype) if unquantised else None
    )


def _add(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    scales: Scales | None,
    ranks: Peers | None,
) -> None:
    x = x.sum(0).to(residual.dtype) if x.dim() == 3 else x  # sum of parts
    residual.copy_(_sum_over_ranks(apply_scales(x, scales), weight, ranks) + residual.float())


def _sum_over_ranks(x: torch.Tensor, weight: torch.Tensor, ranks: Peers | None) -> torch.Tensor:
    """Returns the sum of all ranks' float32 rows, each rounded to the weight's type."""
    if ranks is None:
        return x
    received = exchange(list(x.to(weight.dtype).view(torch.int32)), ranks)
    return torch.stack(received, 1).view(weight.dtype).float().sum(0)


def _normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    weight = weight.float()
    if weight.dim() == 2:
        return F.layer_norm(x, x.shape[-1:], weight[0], weight[1], eps)
    return F.rms_norm(x, weight.shape, weight, eps)
