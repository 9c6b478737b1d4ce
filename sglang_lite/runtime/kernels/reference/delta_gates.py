"""Torch twins of `kernels.delta_gates`, which also compute on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def delta_rates(
    b: torch.Tensor, a: torch.Tensor, rate: torch.Tensor, dt: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return rate * F.softplus(a.float() + dt), scale * b.float().sigmoid()


def gate_heads(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    gate = F.silu(z.float()).view_as(wide)
    return (weight.float() * wide * gate).to(x.dtype).flatten(1)
