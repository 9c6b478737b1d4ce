"""Activations of feed-forwards on a CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sglang_lite.runtime.models.spec import DenseSpec, ExpertsSpec


def apply_activation(gate_up: torch.Tensor, spec: DenseSpec | ExpertsSpec, *, batch_invariant: bool) -> torch.Tensor:
    """Returns act(gate) * up for rows [T, 2 * size] with gates first; without a gate, act(up) for rows [T, size].

    Args:
        gate_up: output of the first product.
        spec: specification of the feed-forward.
        batch_invariant: whether a row's bits must not depend on its neighbours: in 16 bits, torch computes the last
            elements of a thread's share differently.
    """
    if isinstance(spec, DenseSpec) and not spec.gated:
        return _plain(gate_up.float() if batch_invariant else gate_up, spec.activation).to(gate_up.dtype)
    gate, up = gate_up.chunk(2, -1)
    if spec.activation == "silu":
        return F.silu(gate).mul_(up)
    wide = gate.float() if batch_invariant else gate
    if isinstance(spec, ExpertsSpec) and spec.activation == "clamped":
        wide = wide.clamp(max=spec.limit)
        wide = wide * torch.sigmoid(wide * spec.alpha)
        up = up.clamp(-spec.limit, spec.limit) + 1
    else:
        wide = F.gelu(wide, approximate="tanh" if spec.activation == "gelu_tanh" else "none")
    return wide.to(gate.dtype).mul_(up)


def _plain(x: torch.Tensor, activation: str) -> torch.Tensor:
    if activation == "silu":
        return F.silu(x)
    if activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
