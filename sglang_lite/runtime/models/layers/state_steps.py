"""Functions of a device for layers with a recurrent state, and the loop over a step's waves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from sglang_lite.runtime.kernels.reference.delta_gates import delta_rates, gate_heads
from sglang_lite.runtime.kernels.state_rows import StateRows, StateWave
from sglang_lite.runtime.models.layers.delta_scan import delta_scan
from sglang_lite.runtime.models.layers.mamba_scan import mamba1_scan, mamba2_scan
from sglang_lite.runtime.models.layers.mlstm_scan import mlstm_scan
from sglang_lite.runtime.models.layers.state_conv import state_conv
from sglang_lite.runtime.models.layers.wkv_scan import wkv_scan


class StateSteps(NamedTuple):
    """Functions that compute the parts of a layer on a device. They take the arguments of the
    functions of the same names in `kernels`.
    """

    state_conv: Callable[..., torch.Tensor]
    delta_rates: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    delta_scan: Callable[..., torch.Tensor]
    gate_heads: Callable[..., torch.Tensor]
    mamba2_scan: Callable[..., torch.Tensor]
    mamba1_scan: Callable[..., torch.Tensor]
    wkv_scan: Callable[..., torch.Tensor]
    mlstm_scan: Callable[..., torch.Tensor]


ON_CPU = StateSteps(
    state_conv=state_conv,
    delta_rates=delta_rates,
    delta_scan=delta_scan,
    gate_heads=gate_heads,
    mamba2_scan=mamba2_scan,
    mamba1_scan=mamba1_scan,
    wkv_scan=wkv_scan,
    mlstm_scan=mlstm_scan,
)


def compute_waves(
    waves: Sequence[StateWave],
    compute: Callable[[StateRows, Sequence[torch.Tensor]], torch.Tensor],
    *inputs: torch.Tensor,
) -> torch.Tensor:
    """Computes the waves of a step one after the other.

    Args:
        waves: rows of the step; at least one.
        compute: function that returns the outputs of a wave's tokens, given the wave's rows and
            these tokens' inputs.
        inputs: inputs of the step's tokens, [T, ...] each.

    Returns:
        Outputs [T, ...] of all tokens.
    """
    assert waves, "a step has rows, and each has a state"
    if len(waves) == 1:
        return compute(waves[0].rows, inputs)
    out: torch.Tensor | None = None
    for wave in waves:
        at = wave.tokens
        assert at is not None
        part = compute(wave.rows, [each[at] for each in inputs])
        if out is None:
            out = part.new_empty((len(inputs[0]), *part.shape[1:]))
        out[at] = part
    assert out is not None
    return out
