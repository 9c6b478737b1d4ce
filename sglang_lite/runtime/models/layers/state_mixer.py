"""Computes a layer with a recurrent state, whatever its kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from sglang_lite.runtime.kernels.kv_cache import LayerStates
from sglang_lite.runtime.kernels.state_rows import StateWave
from sglang_lite.runtime.models.layers.delta import DeltaWeights, gated_delta
from sglang_lite.runtime.models.layers.lightning import LightningWeights, lightning
from sglang_lite.runtime.models.layers.mamba import (
    Mamba1Weights,
    Mamba2Weights,
    mamba1,
    mamba2,
)
from sglang_lite.runtime.models.layers.mlstm import MlstmWeights, mlstm
from sglang_lite.runtime.models.layers.rg_lru import RgLruWeights, rg_lru
from sglang_lite.runtime.models.layers.rwkv import WkvWeights, mix_over_time
from sglang_lite.runtime.models.layers.state_steps import StateSteps
from sglang_lite.runtime.models.spec import (
    DeltaSpec,
    LightningSpec,
    Mamba1Spec,
    MlstmSpec,
    RgLruSpec,
    StateSpec,
    WkvSpec,
)
from sglang_lite.runtime.parallel.collectives import Collectives

StateWeights: TypeAlias = (
    DeltaWeights
    | LightningWeights
    | Mamba2Weights
    | Mamba1Weights
    | RgLruWeights
    | WkvWeights
    | MlstmWeights
)


def mix_states(
    spec: StateSpec,
    weights: StateWeights | None,
    product: torch.Tensor,
    waves: Sequence[StateWave],
    states: LayerStates | None,
    ranks: Collectives,
    steps: StateSteps,
) -> torch.Tensor:
    """Computes a layer's outputs before the output projection, and its new states.

    Args:
        spec: specification of the layer.
        weights: its weights besides the projections.
        product: its input projections, side by side [T, outputs]; for RWKV, the input itself.
        waves: the step's rows, and the places of their states.
        states: states of the layer (written).
        ranks: collectives of the ranks that share the layer.
        steps: functions that compute the parts on the device.

    Returns:
        Outputs [T, inputs of the output projection], in the data type of `product`.
    """
    assert states is not None
    if isinstance(spec, DeltaSpec):
        assert isinstance(weights, DeltaWeights)
        return gated_delta(spec, weights, product, waves, states, steps)
    if isinstance(spec, LightningSpec):
        assert isinstance(weights, LightningWeights)
        return lightning(spec, weights, product, waves, states, ranks, steps)
    if isinstance(spec, Mamba1Spec):
        assert isinstance(weights, Mamba1Weights)
        return mamba1(spec, weights, product, waves, states, ranks, steps)
    if isinstance(spec, RgLruSpec):
        assert isinstance(weights, RgLruWeights)
        return rg_lru(spec, weights, product, waves, states, steps)
    if isinstance(spec, MlstmSpec):
        assert isinstance(weights, MlstmWeights)
        return mlstm(spec, weights, product, waves, states, steps)
    if isinstance(spec, WkvSpec):
        assert isinstance(weights, WkvWeights)
        return mix_over_time(weights, product, waves, states, steps)
    assert isinstance(weights, Mamba2Weights)
    return mamba2(spec, weights, product, waves, states, ranks, steps)
