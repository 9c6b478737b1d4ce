"""Torch twin of `kernels.mamba1_scan`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.reference.state_rows import row_states
from sglang_lite.runtime.kernels.state_rows import StateRows


def mamba1_scan(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows,
) -> torch.Tensor:
    wide, step = x.double(), dt.double()
    out = x.new_empty(x.shape)
    for begin, end, state in row_states(states, rows):
        for token in range(begin, end):
            state *= (step[token].unsqueeze(1) * a.double()).exp()
            state += (step[token] * wide[token]).unsqueeze(1) * b[token].double()
            out[token] = (state @ c[token].double() + d.double() * wide[token]).to(out.dtype)
    return out
