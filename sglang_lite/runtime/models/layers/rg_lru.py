"""Real-gated linear recurrent unit (RG-LRU; Griffin, arXiv:2402.19427). `RgLruSpec` has the formula.

A channel's state is that of Mamba's state space with a single element: its step is the forget gate,
by which its input is divided first, and its b and c are one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.kv_cache import LayerStates
from sglang_lite.runtime.kernels.state_rows import StateRows, StateWave
from sglang_lite.runtime.models.layers.state_steps import StateSteps, compute_waves
from sglang_lite.runtime.models.spec import RgLruSpec

_MIN_STEP = 1e-30  # inputs are divided by steps


@dataclass(frozen=True, slots=True)
class RgLruWeights:
    """Weights of a layer besides its projections.

    Attributes:
        kernel: float32 [taps + 1, size], the convolution's weights, oldest token first, and then
            its bias.
        enter, forget: matrices of the gates, [blocks, inputs, outputs].
        enter_offset, forget_offset: biases of the gates, float32 [blocks, outputs].
        decay: float32 [size], as in a checkpoint.
        rate: float32 [size, 1], -8 softplus(decay).
        d: float32 [size], zeros: inputs reach the outputs only through the state.
    """

    kernel: torch.Tensor
    enter: torch.Tensor
    enter_offset: torch.Tensor
    forget: torch.Tensor
    forget_offset: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor
    d: torch.Tensor


def rg_lru(
    spec: RgLruSpec,
    weights: RgLruWeights,
    product: torch.Tensor,
    waves: Sequence[StateWave],
    states: LayerStates,
    steps: StateSteps,
) -> torch.Tensor:
    """Computes the layer's outputs before the output projection, and its new states.

    Args:
        spec: specification of the layer.
        weights: its weights.
        product: projections x and y, side by side [T, outputs].
        waves: the step's rows, and the places of their states.
        states: states of the layer (written).
        steps: functions that compute the parts on the device.

    Returns:
        Outputs [T, size], in the data type of `product`.
    """

    def convolve(rows: StateRows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return steps.state_conv(*inputs, weights.kernel, states.tails, rows, activation=False)

    def scan(rows: StateRows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        entering, step = inputs
        amplitude = (-torch.expm1(2 * step * weights.rate[:, 0])).sqrt()
        amplitude.masked_fill_(_first_tokens(rows, len(step)).unsqueeze(1), 1.0)
        ones = step.new_ones((len(step), 1))
        values = entering * amplitude / step
        return steps.mamba1_scan(
            values, ones, ones, step, weights.rate, weights.d, states.sums, rows
        )

    mixed, y = product.split_with_sizes((spec.size, spec.size), 1)
    x = compute_waves(waves, convolve, mixed)
    entering = _gate(x, weights.enter, weights.enter_offset) * x.float()
    step = _gate(x, weights.forget, weights.forget_offset).clamp(min=_MIN_STEP)
    out = compute_waves(waves, scan, entering, step)
    return (out * F.gelu(y.float(), approximate="tanh")).to(product.dtype)


def _gate(x: torch.Tensor, matrices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Returns the gates of all channels, float32 [T, size], given the channels x [T, size]."""
    blocks = x.view(len(x), len(matrices), -1).transpose(0, 1)
    return (torch.bmm(blocks, matrices).transpose(0, 1).float() + offsets).sigmoid().flatten(1)


def _first_tokens(rows: StateRows, tokens: int) -> torch.Tensor:
    """Returns which tokens are the first of a sequence, bool [T]."""
    first = torch.zeros(tokens, dtype=torch.bool, device=rows.read.device)
    return first.index_copy_(0, rows.offsets[:-1].long(), rows.read < 0)
