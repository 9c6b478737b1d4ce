"""Torch twin of `kernels.norm`."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.fp8_rows import Fp8Rows, Scales
from sglang_lite.runtime.kernels.reference.fp8 import quantise_rows, scaled


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float, scales: Scales | None = None) -> torch.Tensor:
    return _normalised(scaled(x, scales), weight, eps).to(x.dtype)


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scales: Scales | None = None
) -> torch.Tensor:
    _add(x, residual, scales)
    return _normalised(residual.float(), weight, eps).to(residual.dtype)


def norm_fp8(x: torch.Tensor, weight: torch.Tensor, eps: float) -> Fp8Rows:
    return quantise_rows(_normalised(x.float(), weight, eps))


def add_norm_fp8(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scales: Scales | None, *,
    unquantised: bool = False,
) -> Fp8Rows:  # fmt: skip
    _add(x, residual, scales)
    normed = _normalised(residual.float(), weight, eps)
    return replace(quantise_rows(normed), unquantised=normed.to(residual.dtype) if unquantised else None)


def _add(x: torch.Tensor, residual: torch.Tensor, scales: Scales | None) -> None:
    x = x.sum(0).to(residual.dtype) if x.dim() == 3 else x  # sum of parts
    residual.copy_(scaled(x, scales) + residual.float())


def _normalised(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    weight = weight.float()
    if weight.dim() == 2:
        return F.layer_norm(x, x.shape[-1:], weight[0], weight[1], eps)
    return F.rms_norm(x, weight.shape, weight, eps)
