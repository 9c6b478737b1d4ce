"""Torch twin of `kernels.lora_own`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.lora_own import OwnRanks, OwnShrunk
from sglang_lite.runtime.kernels.lora_weights import LoraStep, LoraWeights
from sglang_lite.runtime.kernels.reference.activation import apply_activation


def own_ranks(step: LoraStep, slots: torch.Tensor) -> OwnRanks:
    adapters = step.of_slot[slots]
    valid = (adapters >= 0) & (adapters < len(step.ranks))
    own = adapters.where(valid, 0)
    return OwnRanks(step.pages[own] * valid.unsqueeze(1), step.ranks[own] * valid)


def own_shrink(x: torch.Tensor, weights: LoraWeights, ranks: OwnRanks) -> OwnShrunk:
    # [T, parts, ranks, inputs]
    a = weights.a[ranks.pages.long()].transpose(1, 2).flatten(2, 3).float()
    hidden = torch.einsum("ti,tpri->tpr", x.float(), a)
    return OwnShrunk(
        hidden.where(_rank_mask(ranks, hidden.shape[2])[:, None], 0.0).unsqueeze(0), weights, ranks
    )


def own_expand(shrunk: OwnShrunk, product: torch.Tensor, activation: str = "") -> torch.Tensor:
    hidden = shrunk.hidden.sum(0)
    weights = shrunk.weights
    own = _rank_mask(shrunk.ranks, hidden.shape[2])
    # [T, ranks, outputs]
    b = weights.b[shrunk.ranks.pages.long()].flatten(1, 2).float().where(own[:, :, None], 0.0)
    parts = zip(hidden.unbind(1), b.split_with_sizes(weights.outputs, 2))
    total = product.float() + torch.cat(
        [torch.einsum("tr,trn->tn", low, columns) for low, columns in parts], 1
    )
    if not activation:
        return product.copy_(total)
    gate, up = total.to(product.dtype).chunk(2, -1)
    return (apply_activation(gate.float(), activation).to(product.dtype).float() * up.float()).to(
        product.dtype
    )


def _rank_mask(ranks: OwnRanks, width: int) -> torch.Tensor:
    """Returns a mask [T, width], True for ranks that a token's adapter has."""
    return torch.arange(width, device=ranks.ranks.device) < ranks.ranks[:, None]
