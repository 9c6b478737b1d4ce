"""Torch twin of `kernels.mlstm_scan`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.kv_layout import PANEL
from sglang_lite.runtime.kernels.reference.state_rows import row_states
from sglang_lite.runtime.kernels.state_rows import StateRows


def mlstm_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    enter: torch.Tensor,
    decay: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
    *,
    eps: float,
) -> torch.Tensor:
    heads, dk = k.shape[1:]
    dv = v.shape[2]
    panels = -(-dv // PANEL)
    queries, keys, values = q.double() * dk**-0.5, k.double(), v.double()
    i, f = enter.double(), decay.double()
    out = v.new_empty(v.shape)
    for begin, end, state in row_states(states, rows):
        memory = state[:, : dk * dv].view(heads, dk, dv)
        norm = state[:, dk * dv : dk * dv + panels * dk].view(heads, panels, dk)
        peak = state[:, -panels:]
        for token in range(begin, end):
            top = torch.maximum(f[token] + peak[:, 0], i[token])
            kept = (f[token] + peak[:, 0] - top).exp().view(-1, 1, 1)
            new = keys[token] * (i[token] - top).exp().unsqueeze(1)
            memory.copy_(kept * memory + new.unsqueeze(2) * values[token].unsqueeze(1))
            norm.copy_(kept * norm + new.unsqueeze(1))
            peak.copy_(top.unsqueeze(1).expand_as(peak))
            read = (queries[token].unsqueeze(1) @ memory).squeeze(1)
            weight = (queries[token] * norm[:, 0]).sum(1).abs()
            divisor = torch.maximum(weight, (-top).exp()) + eps
            out[token] = (read / divisor.unsqueeze(1)).to(out.dtype)
    return out
