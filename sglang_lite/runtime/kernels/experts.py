"""Experts of a mixture-of-experts layer, computed by the kernels that are fastest for the number of
tokens.

out[t] = base[t] + sum over the token's experts e of weights[t, e] * down[e] (act(gate[e] x[t]) *
(up[e] x[t]))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_lite.runtime.kernels.eight_bit_rows import FLOAT8, EightBitRows
from sglang_lite.runtime.kernels.eight_bits import quantise_rows
from sglang_lite.runtime.kernels.experts_few import experts_down_few, experts_gate_up_few
from sglang_lite.runtime.kernels.experts_order import experts_order
from sglang_lite.runtime.kernels.experts_packed import MAX_BLOCK, packed_down, packed_gate_up
from sglang_lite.runtime.kernels.experts_packed_few import packed_down_few, packed_gate_up_few
from sglang_lite.runtime.kernels.experts_tiled import (
    block_rows,
    can_tile_experts,
    experts_down,
    experts_gate_up,
    experts_sum,
)
from sglang_lite.runtime.kernels.packed_weight import PackedWeight

MAX_PAIRWISE_TOKENS = 8  # maximum number of tokens that are computed pair by pair
MAX_PAIRWISE_TOKENS_8_BIT = 4  # the same for 8-bit weights
MAX_PAIRWISE_TOKENS_4_BIT = 1  # and for 4-bit weights, but two where matrices are small
# numbers; on an H200 1.6 million were faster pair by pair, 6.3 million in blocks
SMALL_MATRIX = 1 << 22


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """Contiguous weights of a layer's experts, or of those that a rank holds. E experts, hidden
    size H, inner size I.

    Attributes:
        gate_up: [E, 2 I, H], gates first; in 4 bits [E * 2 I, H].
        down: [E, H, I]; in 4 bits, like gate_up, [E * H, I].
        gate_up_bias: [E, 2 I] or None.
        down_bias: [E, H] or None.
        gate_up_scales: float32 [E, 2 I / 128, H / 128] for 8-bit weights (e4m3), else None.
        down_scales: float32 [E, H / 128, I / 128] for 8-bit weights, else None.
        of: number of experts in total, if other ranks hold some of them; None if these are all.
    """

    gate_up: torch.Tensor | PackedWeight
    down: torch.Tensor | PackedWeight
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate_up_scales: torch.Tensor | None = None
    down_scales: torch.Tensor | None = None
    of: int | None = None

    @property
    def partial(self) -> bool:
        """True if other ranks hold further experts."""
        return self.of is not None


def apply_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    matrices: ExpertMatrices,
    activation: str,
    *,
    alpha: float = 1.0,
    limit: float = 0.0,
    base: torch.Tensor | None = None,
    quantised: EightBitRows | None = None,
    parts: bool = False,
) -> torch.Tensor:
    """Returns the output [T, H] of a mixture-of-experts layer. Only launches kernels, with grids
    that depend only on T, so it can be part of a CUDA graph.

    Args:
        x: [T, H], contiguous.
        ids, weights: int32 and float32 [T, top], contiguous, from `experts_route`; ids of experts
            that other ranks have are E.
        matrices: weights of the layer's experts.
        activation: "silu", "gelu", "gelu_tanh" or "clamped".
        alpha, limit: parameters of "clamped".
        base: [T, H], contiguous, added to the output (the result of shared experts), or None.
        quantised: x in 8 bits if the caller already has it, or None.
        parts: whether to return the output of more than a few tokens as parts [top, T, H], which
            the caller must add up.
    """
    own = matrices
    top = ids.shape[1]
    if isinstance(own.gate_up, PackedWeight):
        y = _apply_packed_experts(x, ids, weights, own, activation, alpha, limit, base)
        return y if y.dim() == 2 else _combine_parts(y, own, base, parts=parts)
    assert isinstance(own.down, torch.Tensor), "in 4 bits are both or none"
    eight = own.gate_up_scales is not None
    if len(x) <= (MAX_PAIRWISE_TOKENS_8_BIT if eight else MAX_PAIRWISE_TOKENS) or not (
        can_tile_experts(own.gate_up) and can_tile_experts(own.down)
    ):
        hidden = experts_gate_up_few(
            x,
            own.gate_up,
            ids,
            activation,
            scales=own.gate_up_scales,
            bias=own.gate_up_bias,
            alpha=alpha,
            limit=limit,
            partial=own.partial,
        )
        return experts_down_few(
            hidden,
            own.down,
            ids,
            weights,
            scales=own.down_scales,
            bias=own.down_bias,
            base=base,
            partial=own.partial,
        )
    blocks = experts_order(
        ids, len(own.gate_up), block_rows(len(x), top, own.of or len(own.gate_up))
    )
    hidden = experts_gate_up(
        (quantised or quantise_rows(x, FLOAT8)) if eight else x,
        own.gate_up,
        blocks,
        top,
        activation,
        scales=own.gate_up_scales,
        bias=own.gate_up_bias,
        alpha=alpha,
        limit=limit,
    )
    y = experts_down(
        quantise_rows(hidden, FLOAT8) if eight else hidden,
        own.down,
        blocks,
        weights,
        scales=own.down_scales,
        bias=own.down_bias,
        base=None if own.partial else base,
        partial=own.partial,
    )
    return _combine_parts(y, own, base, parts=parts)


def _combine_parts(
    y: torch.Tensor, own: ExpertMatrices, base: torch.Tensor | None, *, parts: bool
) -> torch.Tensor:
    """Returns the sum of y [top, T, N] over each token's experts, or y itself if `parts` is True.
    Adds `base` first if other ranks hold some of the experts.

    If all experts are on this rank, the output of each token's first expert already includes
    `base`.
    """
    if own.partial and base is not None:
        y[0] += base
    return y if parts else experts_sum(y)


def _apply_packed_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    own: ExpertMatrices,
    activation: str,
    alpha: float,
    limit: float,
    base: torch.Tensor | None,
) -> torch.Tensor:
    """Returns the output [T, H] of experts with 4-bit matrices, or parts of it [top, T, H].
    Arguments as for `apply_experts`.
    """
    assert isinstance(own.gate_up, PackedWeight)
    assert isinstance(own.down, PackedWeight)
    top = ids.shape[1]
    experts = own.gate_up.shape[0] // (2 * own.down.inputs)
    few = MAX_PAIRWISE_TOKENS_4_BIT + (own.down.inputs * own.gate_up.inputs <= SMALL_MATRIX)
    if len(x) <= few and own.gate_up.table is None and not own.partial:
        hidden = packed_gate_up_few(
            x,
            own.gate_up,
            experts,
            ids,
            activation,
            bias=own.gate_up_bias,
            alpha=alpha,
            limit=limit,
        )
        return packed_down_few(
            hidden, own.down, experts, ids, weights, bias=own.down_bias, base=base
        )
    blocks = experts_order(ids, experts, min(block_rows(len(x), top, own.of or experts), MAX_BLOCK))
    hidden = packed_gate_up(
        x,
        own.gate_up,
        experts,
        blocks,
        top,
        activation,
        bias=own.gate_up_bias,
        alpha=alpha,
        limit=limit,
    )
    return packed_down(
        hidden,
        own.down,
        experts,
        blocks,
        weights,
        bias=own.down_bias,
        base=None if own.partial else base,
        partial=own.partial,
    )
