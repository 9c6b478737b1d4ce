"""Time mixing and channel mixing of RWKV (arXiv:2305.13048). `WkvSpec` describes time mixing.

Channel mixing is a feed-forward whose input h is mixed with that of the token before, h':

    x_k = mix_k h + (1 - mix_k) h';  x_r = mix_r h + (1 - mix_r) h'
    out = sigmoid(x_r W_r) (relu(x_k W_k)^2 W_v)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_lite.runtime.kernels.kv_cache import LayerStates
from sglang_lite.runtime.kernels.state_rows import StateRows, StateWave
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.layers.state_steps import StateSteps, compute_waves


@dataclass(frozen=True, slots=True)
class WkvWeights:
    """Weights of time mixing besides the output projection.

    Attributes:
        mixes: [3, inputs], shares of the token itself in the inputs of key, value and receptance.
        delay: float32 [3, inputs], kernel that returns the token before, as for `state_conv`.
        key, value, receptance: projections.
        decay: float32 [size], as in a checkpoint.
        rate: float32 [size], -exp(decay).
        first: float32 [size], bonus of the current token.
    """

    mixes: torch.Tensor
    delay: torch.Tensor
    key: Linear
    value: Linear
    receptance: Linear
    decay: torch.Tensor
    rate: torch.Tensor
    first: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChannelMix:
    """Weights of channel mixing besides those of its feed-forward.

    Attributes:
        mixes: [2, hidden_size], shares of the token itself in the inputs of the feed-forward and of
            the gate.
        receptance: projection whose sigmoid is the gate.
        delay: as in `WkvWeights`.
    """

    mixes: torch.Tensor
    receptance: Linear
    delay: torch.Tensor


def delay_kernel(channels: int, device: torch.device) -> torch.Tensor:
    """Returns the kernel, float32 [3, channels], of a convolution over the last two tokens that
    returns the first of them.
    """
    kernel = torch.zeros((3, channels), device=device)
    kernel[0] = 1.0
    return kernel


def mix_over_time(
    weights: WkvWeights,
    x: torch.Tensor,
    waves: Sequence[StateWave],
    states: LayerStates,
    steps: StateSteps,
) -> torch.Tensor:
    """Computes the outputs of time mixing before the output projection, and its new states.

    Args:
        weights: weights of the layer.
        x: normalised inputs [T, inputs].
        waves: the step's rows, and the places of their states.
        states: states of the layer (written).
        steps: functions that compute the parts on the device.

    Returns:
        Outputs [T, size], in the data type of `x`.
    """
    tails = states.tails[:, :, : x.shape[1]]
    for_key, for_value, for_gate = _mix_tokens(
        weights.mixes, weights.delay, x, waves, tails, steps
    ).unbind()

    def scan(rows: StateRows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return steps.wkv_scan(*inputs, weights.rate, weights.first, states.sums, rows)

    projected = (
        weights.key(for_key),
        weights.value(for_value),
        weights.receptance(for_gate),
    )
    return compute_waves(waves, scan, *(each.to(x.dtype) for each in projected))


def mix_channels(
    weights: ChannelMix,
    x: torch.Tensor,
    waves: Sequence[StateWave],
    states: LayerStates | None,
    steps: StateSteps,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the input of the feed-forward and the gate of its output, [T, hidden_size] each.

    Takes the arguments of `mix_over_time`.
    """
    assert states is not None
    tails = states.tails[:, :, x.shape[1] :]  # after the inputs of time mixing
    for_feed, for_gate = _mix_tokens(weights.mixes, weights.delay, x, waves, tails, steps).unbind()
    return for_feed, weights.receptance(for_gate).float().sigmoid().to(x.dtype)


def _mix_tokens(
    mixes: torch.Tensor,
    delay: torch.Tensor,
    x: torch.Tensor,
    waves: Sequence[StateWave],
    tails: torch.Tensor,
    steps: StateSteps,
) -> torch.Tensor:
    """Returns each token mixed with the token before it, [mixes, T, inputs]."""

    def shift(rows: StateRows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return steps.state_conv(*inputs, delay, tails, rows, activation=False)

    return torch.lerp(compute_waves(waves, shift, x), x, mixes.unsqueeze(1))
