"""Torch twin of `kernels.delta_scan`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.reference.state_rows import row_states
from sglang_lite.runtime.kernels.state_rows import StateRows


def delta_scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    repeats = v.shape[1] // k.shape[1]
    queries, keys = (_normalise(each).repeat_interleave(repeats, 1) for each in (q, k))
    kept = decay.double().exp().view(*v.shape[:2], -1, 1)
    out = v.new_empty(v.shape)
    for begin, end, state in row_states(states, rows):
        for token in range(begin, end):
            key, query = keys[token].unsqueeze(-1), queries[token].unsqueeze(-1)  # [Hv, Dk, 1]
            state *= kept[token]
            u = beta[token].double().view(-1, 1) * (v[token].double() - (state * key).sum(1))
            state += key * u.unsqueeze(1)
            out[token] = ((state * query).sum(1) * q.shape[-1] ** -0.5).to(out.dtype)
    return out


def _normalise(x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
