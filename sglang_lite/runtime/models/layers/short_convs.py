"""Short convolutions of a layer's keys and values, and of the outputs of both of its blocks
(Inkling), as described in `ShortConvSpec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.nn import functional

from sglang_lite.runtime.kernels.kv_cache import LayerStates
from sglang_lite.runtime.kernels.state_rows import StateRows, StateWave
from sglang_lite.runtime.models.layers.state_steps import StateSteps, compute_waves
from sglang_lite.runtime.models.spec import ShortConvSpec

CONV_OF_KEYS_VALUES, CONV_OF_ATTENTION, CONV_OF_FEED_FORWARD = range(
    3
)  # the convolutions, in the order of their states


@dataclass(frozen=True, slots=True)
class ShortConvs:
    """Weights of the convolutions, all float32: those of a checkpoint, and kernels computed from them.

    Attributes:
        taps: kernels [channels, taps] of keys, values, attention's outputs and the feed-forward's.
            With dynamic kernels, the first two are [taps, channels], by distance.
        factor: [1], factor of the feed-forward's output.
        kernels: [taps + 1, channels] for `state_conv`: of keys and values, of attention's outputs
            and of the feed-forward's. They include the addition of the inputs, and the factor. With
            dynamic kernels, the first one instead returns the inputs of each earlier token.
    """

    taps: tuple[torch.Tensor, ...]
    factor: torch.Tensor | None
    kernels: tuple[torch.Tensor, ...]


def build_short_convs(
    spec: ShortConvSpec, taps: Sequence[torch.Tensor], factor: torch.Tensor | None
) -> ShortConvs:
    """Builds the weights from those of a checkpoint, which have the form described in `ShortConvs`."""
    scale = (spec.taps + 1) ** -0.5 if spec.scaled else 1.0

    def kernel(*parts: torch.Tensor) -> torch.Tensor:
        whole = torch.cat(parts).T.clone()
        whole[-1] += 1
        return functional.pad(whole * scale, (0, 0, 0, 1))

    keys, values, attention, fed = taps
    first = _earlier_kernel(keys, values) if spec.dynamic else kernel(keys, values)
    last = kernel(fed) if factor is None else kernel(fed) * factor
    return ShortConvs(tuple(taps), factor, (first, kernel(attention), last))


def _earlier_kernel(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns a kernel whose outputs are keys and values of the token before, then of the one before
    that, and so on.
    """
    taps, channels = torch.cat((keys, values), 1).shape
    rows = torch.eye(taps, device=keys.device)[:-1].flip(0)  # one for each distance
    return functional.pad(rows.repeat_interleave(channels, 0).T, (0, 0, 0, 1)).contiguous()


def apply_dynamic_conv(
    spec: ShortConvSpec,
    weights: ShortConvs,
    inputs: torch.Tensor,
    dynamic: torch.Tensor,
    waves: Sequence[StateWave],
    states: LayerStates | None,
    steps: StateSteps,
) -> torch.Tensor:
    """Convolves keys and values with kernels that partly depend on the token.

    Args:
        spec: specification of the convolutions.
        weights, waves, states, steps: as for `apply_short_conv`.
        inputs: keys and values, side by side [T, channels].
        dynamic: dynamic part of the kernels [T, key heads + value heads, taps], with the current
            token's tap first.

    Returns:
        Outputs [T, channels] in the data type of the inputs.
    """
    repeated = inputs.repeat(1, spec.copies)
    earlier = apply_short_conv(weights, CONV_OF_KEYS_VALUES, repeated, waves, states, steps)
    rows, channels = inputs.shape
    # [T, channels, taps], by distance
    every = torch.cat((inputs, earlier), 1).view(rows, spec.taps, channels).transpose(1, 2).float()
    static = torch.cat(weights.taps[:2], 1).T
    kernels = static + dynamic.float().repeat_interleave(channels // dynamic.shape[1], 1)
    out: torch.Tensor = (every * kernels).sum(2) + inputs.float()
    return out.mul_(float((2 * spec.taps + 1) ** -0.5)).to(inputs.dtype)


def apply_short_conv(
    weights: ShortConvs,
    which: int,
    inputs: torch.Tensor,
    waves: Sequence[StateWave],
    states: LayerStates | None,
    steps: StateSteps,
) -> torch.Tensor:
    """Computes one of a layer's convolutions, and stores its last inputs.

    Args:
        weights: weights of the convolutions.
        which: `CONV_OF_KEYS_VALUES`, `CONV_OF_ATTENTION` or `CONV_OF_FEED_FORWARD`.
        inputs: [T, channels], with contiguous channels.
        waves: the step's rows, and the places of their states.
        states: states of the layer (written).
        steps: functions that compute the parts on the device.

    Returns:
        Outputs [T, channels] in the data type of the inputs.
    """
    assert states is not None
    tail = states.tails.shape[1]
    ends = list(accumulate(tail * kernel.shape[1] for kernel in weights.kernels))
    kernel = weights.kernels[which]
    start = ends[which] - tail * kernel.shape[1]
    # each convolution has a contiguous part of a state
    own = states.tails.flatten(1)[:, start : ends[which]]
    tails = own.view(len(own), tail, kernel.shape[1])

    def convolve(rows: StateRows, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return steps.state_conv(*parts, kernel, tails, rows, activation=False)

    return compute_waves(waves, convolve, inputs)
