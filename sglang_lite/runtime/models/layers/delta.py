"""Linear attention by the gated delta rule (Gated DeltaNet, arXiv:2412.06464). `DeltaSpec` has the
formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.kv_cache import LayerStates
from sglang_lite.runtime.kernels.state_rows import StateRows, StateWave
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.layers.state_steps import StateSteps, compute_waves
from sglang_lite.runtime.models.spec import DeltaSpec


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """Weights of a layer besides its projections.

    Attributes:
        kernel: float32 [taps + 1, channels], the convolution's weights, oldest token first, and
            then its bias.
        a_log: float32 [value_heads], as in a checkpoint.
        rate: float32 [value_heads], -exp(a_log).
        dt: float32 [value_heads], or [value_heads * key_size] if each element of a key decays at
            its own rate.
        norm: [value_size], weight of the norm of each head's outputs.
        gate, decays: linear layers that compute z and a from their low-rank vectors, or None.
    """

    kernel: torch.Tensor
    a_log: torch.Tensor
    rate: torch.Tensor
    dt: torch.Tensor
    norm: torch.Tensor
    gate: Linear | None = None
    decays: Linear | None = None


def gated_delta(
    spec: DeltaSpec,
    weights: DeltaWeights,
    product: torch.Tensor,
    waves: Sequence[StateWave],
    states: LayerStates,
    steps: StateSteps,
) -> torch.Tensor:
    """Computes the layer's outputs before the output projection, and its new states.

    Args:
        spec: specification of the layer.
        weights: its weights.
        product: projections q, k, v, z, b and a, or low-rank vectors of z and a, side by side [T,
            outputs].
        waves: the step's rows, and the places of their states.
        states: states of the layer (written).
        steps: functions that compute the parts on the device.

    Returns:
        Outputs [T, value_heads * value_size], in the data type of `product`.
    """
    keys = spec.key_heads * spec.key_size
    values = spec.value_heads * spec.value_size
    mixed, z, b, a = product.split_with_sizes((spec.channels, *spec.gate_sizes), 1)
    if weights.decays is not None:
        a = weights.decays(a.contiguous())
    if spec.by_element:
        decay = _decays_by_element(spec, weights, a)
        beta = spec.beta_scale * b.float().sigmoid()
    else:
        decay, beta = steps.delta_rates(b, a, weights.rate, weights.dt, spec.beta_scale)

    def scan(rows: StateRows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        mixed, decay, beta = inputs
        convolved = steps.state_conv(mixed, weights.kernel, states.tails, rows)
        q, k, v = convolved.split_with_sizes((keys, keys, values), 1)
        return steps.delta_scan(
            q.view(len(q), spec.key_heads, -1),
            k.view(len(k), spec.key_heads, -1),
            v.view(len(v), spec.value_heads, -1),
            decay,
            beta,
            states.sums,
            rows,
        )

    out = compute_waves(waves, scan, mixed, decay, beta)
    if not spec.by_element:
        return steps.gate_heads(out, z, weights.norm, spec.norm_eps)
    if weights.gate is not None:
        z = weights.gate(z.contiguous())
    gate = z.float().sigmoid().view_as(out)
    normed = F.rms_norm(out.float(), weights.norm.shape, weights.norm.float(), spec.norm_eps)
    return (normed * gate).to(out.dtype).flatten(1)


def _decays_by_element(spec: DeltaSpec, weights: DeltaWeights, a: torch.Tensor) -> torch.Tensor:
    """Returns the logarithms of the decays of each element of a key, float32 [T, value_heads,
    key_size], given a [T, value_heads * key_size].
    """
    wide = (a.float() + weights.dt).view(len(a), spec.value_heads, -1)
    rate = weights.rate.unsqueeze(1)
    if spec.decay_bound is None:
        return rate * F.softplus(wide)
    return spec.decay_bound * torch.sigmoid(-rate * wide)
