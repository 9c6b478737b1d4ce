"""Torch twin of `kernels.wkv_scan`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.reference.state_rows import row_states
from sglang_lite.runtime.kernels.state_rows import StateRows


def wkv_scan(
    k: torch.Tensor,
    v: torch.Tensor,
    r: torch.Tensor,
    rate: torch.Tensor,
    first: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    keys, values, gates = k.double(), v.double(), r.double().sigmoid()
    out = v.new_empty(v.shape)
    for begin, end, state in row_states(states, rows):
        total, weight, peak = state
        peak.masked_fill_(weight == 0, -1e38)
        for token in range(begin, end):
            bonus = first.double() + keys[token]
            top = torch.maximum(peak, bonus)
            old, new = (peak - top).exp(), (bonus - top).exp()
            average = (old * total + new * values[token]) / (old * weight + new)
            out[token] = (gates[token] * average).to(out.dtype)
            top = torch.maximum(peak + rate.double(), keys[token])
            old, new = (peak + rate.double() - top).exp(), (keys[token] - top).exp()
            total.copy_(old * total + new * values[token])
            weight.copy_(old * weight + new)
            peak.copy_(top)
    return out
