"""Torch twin of `kernels.fp8`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.fp8_rows import Fp8Rows, Scales


def quantise_rows(x: torch.Tensor) -> Fp8Rows:
    eight, rows = Fp8Rows.empty(x, x.shape[1]), len(x)
    x = x.float()
    scales = x.abs().amax(1).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    eight.scales[:rows] = scales
    eight.values[:rows] = (x / scales.unsqueeze(1)).to(torch.float8_e4m3fn)
    return eight


def scaled(x: torch.Tensor, scales: Scales | None) -> torch.Tensor:
    """Returns x [M, N] times its scales, in float32."""
    x = x.float()
    return x if scales is None else x * scales.rows[: len(x)].unsqueeze(1) * scales.columns
