"""Compressed convolutional attention (CCA, arXiv:2510.04476): convolutions that change queries, keys
and values before the rotation.

Queries and keys, the channels c, pass through a convolution of each channel, and then through one
of each head. With r[t], the mean of a query and its key:

    m[t] = bias1 + sum over i of w1[:, i] * c[t - taps1 + 1 + i]
    out[t] = bias2 + sum over i of W2[:, :, i] m[t - taps2 + 1 + i]
    q = normalise(out_q + r)
    k = normalise(out_k + mean of r over the key's queries) * scale

Half of the values are those of the token before. Before the first token, c and values are zeros, and
m is bias1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.kv_cache import LayerStates
from sglang_lite.runtime.kernels.state_rows import StateRows, StateWave
from sglang_lite.runtime.models.layers.state_steps import StateSteps, compute_waves
from sglang_lite.runtime.models.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class CcaWeights:
    """Weights of the convolutions, all float32: those of a checkpoint, and what is computed of them.

    Attributes:
        first, first_bias: w1 [channels, taps1] and bias1 [channels].
        second, second_bias: W2 of each head [channels, key_size, taps2] and bias2 [channels].
        scale: [kv_heads].
        kernel: [taps + 1, taps2 * channels + values], for `state_conv`. Its channels are m without
            bias1 of each token that W2 reads, the last one first, and values of the token before.
        matrices: [heads, taps2 * key_size, key_size], W2 in the order of the kernel's channels.
        bias: [heads, key_size], bias2 and what W2 adds for bias1.
    """

    first: torch.Tensor
    first_bias: torch.Tensor
    second: torch.Tensor
    second_bias: torch.Tensor
    scale: torch.Tensor
    kernel: torch.Tensor
    matrices: torch.Tensor
    bias: torch.Tensor


def build_cca_weights(
    first: torch.Tensor,
    first_bias: torch.Tensor,
    second: torch.Tensor,
    second_bias: torch.Tensor,
    scale: torch.Tensor,
    values: int,
) -> CcaWeights:
    """Returns the weights of the convolutions, given those of a checkpoint.

    Args:
        first, first_bias, second, second_bias, scale: as in `CcaWeights`.
        values: number of values of the token before.
    """
    size, lags = second.shape[1:]
    tail = max(first.shape[1] + lags - 2, 1)
    kernels = [F.pad(first, (tail + 1 - first.shape[1] - lag, lag)) for lag in range(lags)]
    delay = first.new_zeros((values, tail + 1))
    delay[:, -2] = 1
    by_head = second.view(-1, size, size, lags)
    added = by_head.sum(3) @ first_bias.view(-1, size, 1)
    return CcaWeights(
        first,
        first_bias,
        second,
        second_bias,
        scale,
        kernel=F.pad(torch.cat((*kernels, delay)).T, (0, 0, 0, 1)).contiguous(),
        matrices=by_head.flip(3).permute(0, 3, 2, 1).flatten(1, 2).contiguous(),
        bias=added.squeeze(2) + second_bias.view(-1, size),
    )


def convolve_heads(
    spec: AttentionSpec,
    weights: CcaWeights,
    product: torch.Tensor,
    waves: Sequence[StateWave],
    states: LayerStates | None,
    steps: StateSteps,
) -> torch.Tensor:
    """Returns a layer's queries, keys and values, side by side [T, outputs], and stores its states.

    Args:
        spec: specification of the layer's attention.
        weights: weights of the convolutions.
        product: projections of queries, keys, values and values of the token before, side by side.
        waves: the step's rows, and the places of their states.
        states: states of the layer (written).
        steps: functions that compute the parts on the device.
    """
    assert states is not None
    tails = states.tails
    rows = len(product)
    size = spec.key_size
    half = spec.projected_values // 2
    sizes = (spec.heads * size, spec.kv_heads * size, half, half)
    q, k, now, delayed = product.split_with_sizes(sizes, 1)
    channels = torch.cat((q, k), 1)
    lags = weights.second.shape[2]

    def convolve(rows: StateRows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return steps.state_conv(*inputs, weights.kernel, tails, rows, activation=False)

    convolved = compute_waves(waves, convolve, torch.cat((*[channels] * lags, delayed), 1))
    *mixed, before = convolved.split_with_sizes((*[channels.shape[1]] * lags, half), 1)
    heads = torch.cat([each.view(rows, -1, size) for each in mixed], 2).float()
    out = (heads.transpose(0, 1) @ weights.matrices).transpose(0, 1) + weights.bias
    mean = (q.view(rows, spec.kv_heads, -1, size) + k.view(rows, -1, 1, size)).float() * 0.5
    eps = torch.finfo(product.dtype).eps
    root = math.sqrt(size)
    q = F.normalize(out[:, : spec.heads] + mean.flatten(1, 2), dim=2, eps=eps) * root
    k = F.normalize(out[:, spec.heads :] + mean.mean(2), dim=2, eps=eps) * root
    k = k * weights.scale.unsqueeze(1)
    parts = (q.flatten(1), k.flatten(1), now, before)
    return torch.cat([each.to(product.dtype) for each in parts], 1)
