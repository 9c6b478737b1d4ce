"""Torch twin of `kernels.mamba2_scan`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.reference.state_rows import row_states
from sglang_lite.runtime.kernels.state_rows import StateRows


def mamba2_scan(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    repeats = x.shape[1] // b.shape[1]
    wide_b, wide_c = (each.double().repeat_interleave(repeats, 1).unsqueeze(1) for each in (b, c))
    wide, step = x.double().unsqueeze(-1), dt.double()[..., None, None]
    out = x.new_empty(x.shape)
    for begin, end, state in row_states(states, rows):
        for token in range(begin, end):
            state *= (step[token] * a.double().view(-1, 1, 1)).exp()
            state += step[token] * wide[token] * wide_b[token].transpose(0, 1)
            y = (state * wide_c[token].transpose(0, 1)).sum(-1)
            out[token] = (y + d.double().unsqueeze(1) * wide[token, ..., 0]).to(out.dtype)
    return out
