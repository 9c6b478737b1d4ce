"""Linear attention whose heads decay at constant rates (Lightning Attention, arXiv:2401.04658).
`LightningSpec` has the formula.

A head's state is that of a state space of Mamba 2 with steps of one: its x is the value, b the key
and c the query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.kv_cache import LayerStates
from sglang_lite.runtime.kernels.state_rows import StateRows, StateWave
from sglang_lite.runtime.models.layers.state_steps import StateSteps, compute_waves
from sglang_lite.runtime.models.spec import LightningSpec
from sglang_lite.runtime.parallel.collectives import Collectives


@dataclass(frozen=True, slots=True)
class LightningWeights:
    """Weights of a layer besides its projections.

    Attributes:
        rate: float32 [heads], -slope.
        d: float32 [heads], zeros: values reach the outputs only through the state.
        norm: [heads * size], weight of the norm.
    """

    rate: torch.Tensor
    d: torch.Tensor
    norm: torch.Tensor


def lightning(
    spec: LightningSpec,
    weights: LightningWeights,
    product: torch.Tensor,
    waves: Sequence[StateWave],
    states: LayerStates,
    ranks: Collectives,
    steps: StateSteps,
) -> torch.Tensor:
    """Computes the layer's outputs before the output projection, and its new states.

    Args:
        spec: specification of the layer.
        weights: its weights.
        product: projections q, k, v and z, side by side [T, outputs].
        waves: the step's rows, and the places of their states.
        states: states of the layer (written).
        ranks: collectives of the ranks that share the layer.
        steps: functions that compute the parts on the device.

    Returns:
        Outputs [T, heads * size], in the data type of `product`.
    """
    mixed, z = product.split_with_sizes((3 * spec.inner_size, spec.inner_size), 1)

    def scan(rows: StateRows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        (mixed,) = inputs
        q, k, v = (part.view(len(mixed), spec.heads, -1) for part in mixed.chunk(3, 1))
        ones = mixed.new_ones((len(mixed), spec.heads), dtype=torch.float32)
        return steps.mamba2_scan(v, k, q, ones, weights.rate, weights.d, states.sums, rows)

    wide = compute_waves(waves, scan, F.silu(mixed)).flatten(1).float()
    squares = wide.square().sum(1, keepdim=True)
    if spec.norm_size > spec.inner_size:
        squares = ranks.sum(squares)
    scale = torch.rsqrt(squares / spec.norm_size + spec.norm_eps) * spec.output_scale
    return (wide * scale * weights.norm.float() * z.float().sigmoid()).to(product.dtype)
