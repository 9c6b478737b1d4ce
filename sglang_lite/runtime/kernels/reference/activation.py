"""Torch twin of `kernels.activation`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.eight_bit_rows import EightBitRows, Scales
from sglang_lite.runtime.kernels.reference.eight_bits import apply_scales, quantise_rows


def apply_gated(
    gate_up: torch.Tensor, activation: str, scales: Scales | None = None
) -> torch.Tensor:
    return _apply_gated_in_float(gate_up, activation, scales).to(gate_up.dtype)


def apply_gated_eight(
    gate_up: torch.Tensor, activation: str, scales: Scales | None, kind: torch.dtype
) -> EightBitRows:
    return quantise_rows(_apply_gated_in_float(gate_up, activation, scales), kind)


def apply_ungated(up: torch.Tensor, activation: str, scales: Scales | None = None) -> torch.Tensor:
    return apply_activation(apply_scales(up, scales), activation).to(up.dtype)


def apply_ungated_eight(
    up: torch.Tensor, activation: str, scales: Scales | None, kind: torch.dtype
) -> EightBitRows:
    return quantise_rows(apply_activation(apply_scales(up, scales), activation), kind)


def _apply_gated_in_float(
    gate_up: torch.Tensor, activation: str, scales: Scales | None
) -> torch.Tensor:
    gate, up = apply_scales(gate_up, scales).chunk(2, -1)
    return apply_activation(gate, activation).to(gate_up.dtype).float() * up


def apply_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Applies the activation "silu", "gelu", "gelu_tanh" or "relu2" to x."""
    if kind == "silu":
        return F.silu(x)
    if kind == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def gated_pair(
    gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float, kind: str
) -> torch.Tensor:
    if kind == "clamped":
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)
    return apply_activation(gate, kind) * up
