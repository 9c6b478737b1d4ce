"""Attention of each token over the outputs of earlier blocks of layers (Inkling 2), as described in
`DepthSpec`.
"""

from __future__ import annotations

import torch

from sglang_lite.runtime.models.layers.norm import apply_norm

_EPS = 1e-6  # configs don't change it


def attend_over_depth(
    queries: torch.Tensor, blocks: torch.Tensor, partial: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Computes inputs of a layer, one float32 [T, hidden] for each query.

    Args:
        queries: float32 [queries, hidden].
        blocks: outputs of the earlier blocks [T, blocks, hidden].
        partial: sum of the current block so far [T, hidden].
    """
    sources = torch.cat((blocks.float(), partial.float().unsqueeze(1)), 1)
    sources = apply_norm(sources, None, _EPS, "rms")
    weights = (sources @ queries.T * queries.shape[1] ** -0.5).softmax(1)
    seen: torch.Tensor = weights.transpose(1, 2) @ sources
    return seen.unbind(1)
