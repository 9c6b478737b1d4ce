"""Torch twin of `kernels.experts_route`."""

from __future__ import annotations

import torch


def experts_route(
    logits: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    correction: torch.Tensor | None = None,
    groups: int = 1,
    kept_groups: int = 1,
    group_top: int = 1,
    normalise: bool = True,
    scale: float = 1.0,
    local_ids: torch.Tensor | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.sum(0) if logits.dim() == 3 else logits  # sum of parts
    score = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(-1)
    choice = score if correction is None else score + correction.float()
    bad = choice.isnan().any(-1, keepdim=True)
    if kept_groups < groups:
        by_group = choice.view(len(choice), groups, -1)
        ranks = by_group.sort(dim=-1, descending=True).values[..., :group_top].sum(-1)
        others = ranks.sort(dim=-1, descending=True, stable=True).indices[:, kept_groups:]
        choice = by_group.scatter(
            1, others.unsqueeze(-1).expand(-1, -1, by_group.shape[-1]), -torch.inf
        ).flatten(1)
    ids = choice.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = score.gather(1, ids)
    if normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    ids = torch.where(bad, torch.arange(top_k, device=ids.device), ids)
    if counts is not None:
        counts += ids.flatten().bincount(minlength=len(counts))
    if local_ids is not None:
        turns = torch.arange(len(ids), device=ids.device) % len(local_ids)
        ids = local_ids[turns.unsqueeze(1), ids]
    return ids.int(), (weights * scale).masked_fill(bad, torch.nan)
