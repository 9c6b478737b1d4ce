"""Attention bias by distance (Inkling), as described in `DistanceBiasSpec`."""

from __future__ import annotations

import torch


def limit_norms(x: torch.Tensor, limit: float, scale: torch.Tensor | None) -> torch.Tensor:
    """Multiplies vectors by `scale` if given, and then shortens those with a larger norm than
    `limit`.

    Args:
        x: [T, heads, size].
        limit: the largest norm.
        scale: [heads, size], or None.
    """
    wide = x.float() if scale is None else x.float() * scale.float()
    norms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    shortened: torch.Tensor = wide * (limit / (norms + 1e-6)).clamp(max=1.0)
    return shortened.to(x.dtype)


def compute_distance_bias(
    vectors: torch.Tensor,
    bank: torch.Tensor,
    heads: int,
    query_scale: torch.Tensor | None,
    scale: torch.Tensor | None = None,
    clip: float | None = None,
) -> torch.Tensor:
    """Computes `AttentionRules.bias` [T, heads, extent].

    Args:
        vectors: r of all heads, side by side [T, heads * rank].
        bank: [rank, extent].
        heads: number of heads.
        query_scale: factors of the queries [T, 1, 1], or None.
        scale, clip: factors of r [heads, rank], and the largest norm of r after scaling; or None
            for both.
    """
    if clip is not None:
        vectors = limit_norms(vectors.view(len(vectors), heads, -1), clip, scale)
    bias = vectors.reshape(-1, bank.shape[0]) @ bank
    bias = bias.view(len(vectors), heads, bank.shape[1])
    return bias if query_scale is None else bias.mul_(query_scale)
