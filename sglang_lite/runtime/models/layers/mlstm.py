"""Matrix memories of xLSTM (mLSTM, arXiv:2405.04517). `MlstmSpec` has the formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.kv_cache import LayerStates
from sglang_lite.runtime.kernels.state_rows import StateRows, StateWave
from sglang_lite.runtime.models.layers.state_steps import StateSteps, compute_waves
from sglang_lite.runtime.models.spec import MlstmSpec


@dataclass(frozen=True, slots=True)
class MlstmWeights:
    """Weights of a layer besides its projections.

    Attributes:
        norm: [heads * value_size], weight of the norm of the heads' outputs.
    """

    norm: torch.Tensor


def mlstm(
    spec: MlstmSpec,
    weights: MlstmWeights,
    product: torch.Tensor,
    waves: Sequence[StateWave],
    states: LayerStates,
    steps: StateSteps,
) -> torch.Tensor:
    """Computes the layer's outputs before the output projection, and its new states.

    Args:
        spec: specification of the layer.
        weights: its weights.
        product: projections q, k, v, z, i and f, side by side [T, outputs].
        waves: the step's rows, and the places of their states.
        states: states of the layer (written).
        steps: functions that compute the parts on the device.

    Returns:
        Outputs [T, heads * value_size], in the data type of `product`.
    """
    q, k, v, z, enter, forget = product.split_with_sizes(spec.projections, 1)
    q, k, v = (each.view(len(each), spec.heads, -1) for each in (q, k, v))
    gates = torch.stack((enter, forget)).float()
    enter, forget = (spec.gate_cap * torch.tanh(gates / spec.gate_cap)).unbind()

    def scan(rows: StateRows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return steps.mlstm_scan(*inputs, states.sums, rows, eps=spec.eps)

    out = compute_waves(waves, scan, q, k, v, enter, F.logsigmoid(forget)).float()
    normed = F.layer_norm(out, out.shape[2:], eps=spec.norm_eps).flatten(1)
    return (normed * weights.norm.float() * z.float().sigmoid()).to(product.dtype)
