"""Torch twin of `kernels.state_conv`."""

from __future__ import annotations

import torch
from torch.nn import functional

from sglang_lite.runtime.kernels.reference.state_rows import row_states
from sglang_lite.runtime.kernels.state_rows import StateRows


def state_conv(
    inputs: torch.Tensor,
    kernel: torch.Tensor,
    tails: torch.Tensor,
    rows: StateRows,
    *,
    activation: bool = True,
) -> torch.Tensor:
    *weights, bias = kernel.double()
    out = inputs.new_empty(inputs.shape)
    for begin, end, tail in row_states(tails, rows):
        seen = torch.cat((tail, inputs[begin:end].double()))
        total = bias.expand(end - begin, -1).clone()
        for i, weight in enumerate(weights):
            total += weight * seen[i : i + end - begin]
        out[begin:end] = (functional.silu(total) if activation else total).to(out.dtype)
        tail.copy_(seen[end - begin :])
    return out
