"""Torch twin of `kernels.eight_bits`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.eight_bit_rows import LARGEST, EightBitRows, Scales


def quantise_rows(x: torch.Tensor, kind: torch.dtype) -> EightBitRows:
    eight = EightBitRows.allocate_eight_bit(x, x.shape[1], kind)
    rows = len(x)
    x = x.float()
    scales = x.abs().amax(1).clamp_min(1e-12) / LARGEST[kind]
    x = x / scales.unsqueeze(1)
    eight.scales[:rows] = scales
    eight.values[:rows] = ((x + 0.5).floor() if kind == torch.int8 else x).to(kind)
    return eight


def apply_scales(x: torch.Tensor, scales: Scales | None) -> torch.Tensor:
    """Returns x [M, N] times its scales, in float32."""
    x = x.float()
    return x if scales is None else x * scales.rows[: len(x)].unsqueeze(1) * scales.columns
