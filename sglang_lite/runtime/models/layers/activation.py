"""Activations of gated feed-forwards, on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_lite.runtime.models.spec import DenseSpec, ExpertsSpec


def gated(gate_up: torch.Tensor, spec: DenseSpec | ExpertsSpec, *, exact: bool) -> torch.Tensor:
    """act(gate) * up of rows [T, 2 size], gates first.

    Args:
        exact: a row's bits don't depend on its neighbours: in 16 bits, torch computes the last elements of a thread's
            share differently.
    """
    gate, up = gate_up.chunk(2, -1)
    if spec.activation == "silu":
        return F.silu(gate).mul_(up)
    wide = gate.float() if exact else gate
    if isinstance(spec, ExpertsSpec) and spec.activation == "clamped":
        wide = wide.clamp(max=spec.limit)
        wide = wide * torch.sigmoid(wide * spec.alpha)
        up = up.clamp(-spec.limit, spec.limit) + 1
    else:
        wide = F.gelu(wide, approximate="tanh" if spec.activation == "gelu_tanh" else "none")
    return wide.to(gate.dtype).mul_(up)
