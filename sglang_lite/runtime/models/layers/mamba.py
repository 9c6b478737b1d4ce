"""Selective state spaces of Mamba 2 (arXiv:2405.21060) and Mamba (arXiv:2312.00752). `Mamba2Spec`
and `Mamba1Spec` have the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.kv_cache import LayerStates
from sglang_lite.runtime.kernels.state_rows import StateRows, StateWave
from sglang_lite.runtime.models.layers.linear import Linear
from sglang_lite.runtime.models.layers.norm import apply_norm
from sglang_lite.runtime.models.layers.state_steps import StateSteps, compute_waves
from sglang_lite.runtime.models.spec import Mamba1Spec, Mamba2Spec
from sglang_lite.runtime.parallel.collectives import Collectives


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """Weights of a layer besides its projections.

    Attributes:
        kernel: float32 [taps + 1, channels], the convolution's weights, oldest token first, and
            then its bias.
        a_log: float32 [heads], as in a checkpoint.
        rate: float32 [heads], -exp(a_log).
        dt: float32 [heads], added to dt.
        d: float32 [heads].
        norm: [heads * head_size], weight of the norm, or None.
        scales: factors of the projections' outputs, or None.
    """

    kernel: torch.Tensor
    a_log: torch.Tensor
    rate: torch.Tensor
    dt: torch.Tensor
    d: torch.Tensor
    norm: torch.Tensor | None
    scales: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Mamba1Weights:
    """Weights of a layer besides the projections of its input and output.

    Attributes:
        kernel: float32 [taps + 1, size], as in `Mamba2Weights`.
        low: for each group, linear layer of its channels that returns low, b and c.
        steps: for each group, linear layer of low that returns its channels' steps.
        norms: weights of the norms of low, b and c, float32; empty for none.
        a_log: float32 [size, state_size], as in a checkpoint.
        rate: float32 [size, state_size], -exp(a_log).
        dt: float32 [size], added to steps.
        d: float32 [size].
    """

    kernel: torch.Tensor
    low: tuple[Linear, ...]
    steps: tuple[Linear, ...]
    norms: tuple[torch.Tensor, ...]
    a_log: torch.Tensor
    rate: torch.Tensor
    dt: torch.Tensor
    d: torch.Tensor


def mamba1(
    spec: Mamba1Spec,
    weights: Mamba1Weights,
    product: torch.Tensor,
    waves: Sequence[StateWave],
    states: LayerStates,
    ranks: Collectives,
    steps: StateSteps,
) -> torch.Tensor:
    """Computes the layer's outputs before the output projection, and its new states.

    Takes the arguments of `mamba2`; `product` has the projections x and z.

    Returns:
        Outputs [T, size], in the data type of `product`.
    """

    def convolve(rows: StateRows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return steps.state_conv(*inputs, weights.kernel, states.tails, rows)

    mixed, z = product.split_with_sizes((spec.size, spec.size), 1)
    x = compute_waves(waves, convolve, mixed)
    groups = enumerate(x.chunk(spec.groups, 1))
    scanned = [
        _scan_group(spec, weights, i, channels, waves, states, ranks, steps)
        for i, channels in groups
    ]
    out = torch.cat(scanned, 1) if spec.groups > 1 else scanned[0]
    return (out.float() * F.silu(z.float())).to(out.dtype)


def _scan_group(
    spec: Mamba1Spec,
    weights: Mamba1Weights,
    group: int,
    x: torch.Tensor,
    waves: Sequence[StateWave],
    states: LayerStates,
    ranks: Collectives,
    steps: StateSteps,
) -> torch.Tensor:
    """Returns the outputs of a group's convolved channels [T, size / groups], without the gate."""
    rate, d, dt = (each.chunk(spec.groups)[group] for each in (weights.rate, weights.d, weights.dt))
    pool = states.sums.view(-1, spec.size // spec.groups, spec.state_size)

    def scan(rows: StateRows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        return steps.mamba1_scan(*inputs, rate, d, pool, _rows_of_group(rows, group, spec.groups))

    every = weights.low[group](x.contiguous())
    if spec.sharers > 1:
        every = ranks.sum(every)
    parts: Sequence[torch.Tensor] = every.split_with_sizes(spec.low_sizes, 1)
    if spec.norm_eps is not None:
        eps = spec.norm_eps
        norms = weights.norms or [None] * len(parts)
        parts = [apply_norm(part, norm, eps, "rms") for part, norm in zip(parts, norms)]
    low, b, c = parts
    step = F.softplus(weights.steps[group](low.to(x.dtype).contiguous()).float() + dt)
    return compute_waves(waves, scan, x, b, c, step)


def _rows_of_group(rows: StateRows, group: int, groups: int) -> StateRows:
    """Returns rows with the places of one group's states in a pool with a place for each group."""
    if groups == 1:
        return rows
    read, write = (
        torch.where(each < 0, each, each * groups + group) for each in (rows.read, rows.write)
    )
    return replace(rows, read=read, write=write)


def mamba2(
    spec: Mamba2Spec,
    weights: Mamba2Weights,
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
        product: projections z, x, b, c and dt, side by side [T, outputs].
        waves: the step's rows, and the places of their states.
        states: states of the layer (written).
        ranks: collectives of the ranks that share the layer.
        steps: functions that compute the parts on the device.

    Returns:
        Outputs [T, heads * head_size], in the data type of `product`.
    """
    if weights.scales is not None:
        product = product * weights.scales
    z, mixed, dt = product.split_with_sizes((spec.inner_size, spec.channels, spec.heads), 1)
    step = F.softplus(dt.float() + weights.dt).clamp(*spec.step_limits)
    shared = spec.groups * spec.state_size

    def scan(rows: StateRows, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        mixed, step = inputs
        convolved = steps.state_conv(mixed, weights.kernel, states.tails, rows)
        x, b, c = convolved.split_with_sizes((spec.inner_size, shared, shared), 1)
        return steps.mamba2_scan(
            x.view(len(x), spec.heads, -1),
            b.view(len(b), spec.groups, -1),
            c.view(len(c), spec.groups, -1),
            step,
            weights.rate,
            weights.d,
            states.sums,
            rows,
        )

    out = compute_waves(waves, scan, mixed, step)
    return _gate(spec, weights, out, z, ranks)


def _gate(
    spec: Mamba2Spec,
    weights: Mamba2Weights,
    out: torch.Tensor,
    z: torch.Tensor,
    ranks: Collectives,
) -> torch.Tensor:
    """Multiplies outputs [T, heads, head_size] by the activated gate, and normalises them."""
    wide = out.flatten(1).float()
    gate = F.silu(z.float())
    if spec.norm != "before":
        wide = wide * gate
    if weights.norm is not None:
        wide = _normalise_groups(spec, wide, ranks) * weights.norm.float()
    if spec.norm == "before":
        wide = wide * gate
    if spec.output_scale != 1.0:
        wide = wide * spec.output_scale
    return wide.to(out.dtype)


def _normalise_groups(spec: Mamba2Spec, x: torch.Tensor, ranks: Collectives) -> torch.Tensor:
    """Divides float32 outputs [T, heads * head_size] by the root of their mean square in each
    group. Ranks may have parts of a group.
    """
    grouped = x.view(len(x), spec.groups, -1)
    squares = grouped.square().sum(-1, keepdim=True)
    size = torch.full_like(squares[:1], grouped.shape[-1])
    if spec.sharers > 1:  # one group, in parts
        column, _ = divmod(ranks.parallel.rank, spec.sharers)
        every = x.new_zeros((len(x) + 1, ranks.parallel.tp // spec.sharers))
        every[:, column] = torch.cat((squares, size)).flatten()
        own = ranks.sum(every)[:, column].view(-1, 1, 1)
        squares = own[:-1]
        size = own[-1:]
    return (grouped * torch.rsqrt(squares / size + spec.norm_eps)).flatten(1)
