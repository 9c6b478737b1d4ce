"""Causal depthwise convolution in front of a recurrent state, on a CPU."""

from __future__ import annotations

import torch
from torch.nn import functional

from sglang_lite.runtime.kernels.state_rows import StateRows
from sglang_lite.runtime.models.layers.state_pool import read_states, write_states


def state_conv(
    inputs: torch.Tensor,
    kernel: torch.Tensor,
    tails: torch.Tensor,
    rows: StateRows,
    *,
    activation: bool = True,
) -> torch.Tensor:
    """Convolves each row's inputs with those before them, and stores its last inputs.

        out[t] = silu(bias + sum over k of kernel[k] * inputs[t - W + 1 + k])

    Args:
        inputs: [T, C].
        kernel: float32 [W + 1, C], weights from the oldest input to the newest, and then the bias.
        tails: pool [S, W - 1, C] of the inputs before a row's first token, oldest first (written).
        rows: rows of the step.
        activation: applies SiLU to the sum.

    Returns:
        Outputs [T, C], in the data type of `inputs`; sums are in float32.
    """
    before = len(kernel) - 2
    count = len(rows.read)
    # each row's tail and its inputs, one after the other
    row = torch.arange(count, device=inputs.device)
    lengths = rows.offsets.diff()
    own = torch.arange(len(inputs), device=inputs.device)
    own += torch.repeat_interleave((row + 1) * before, lengths, output_size=len(inputs))
    extended = inputs.new_empty((len(inputs) + count * before, inputs.shape[1]))
    extended.index_copy_(0, own, inputs)
    within = row.unsqueeze(1) * before + torch.arange(before, device=inputs.device)
    tail = (rows.offsets[:-1].unsqueeze(1) + within).flatten()
    extended.index_copy_(0, tail, read_states(tails, rows.read).flatten(0, 1).to(inputs.dtype))
    *earlier, last, bias = kernel
    out = torch.addcmul(bias, inputs.float(), last)
    for distance, weight in enumerate(reversed(earlier), 1):
        out.addcmul_(extended.index_select(0, own - distance).float(), weight)
    newest = (rows.offsets[1:].unsqueeze(1) + within).flatten()
    new = extended.index_select(0, newest).view(count, *tails.shape[1:])
    write_states(tails, rows.write, new)
    if activation:
        out = functional.silu(out)
    return out.to(inputs.dtype)
