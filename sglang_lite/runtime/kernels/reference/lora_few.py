"""Torch twin of `kernels.lora_few`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.lora_few import BLOCK_R, JoinedRanks, Shrunk
from sglang_lite.runtime.kernels.lora_weights import MAX_PARTS, RANKS, LoraStep, LoraWeights
from sglang_lite.runtime.kernels.reference.activation import apply_activation


def join_ranks(step: LoraStep, slots: torch.Tensor) -> JoinedRanks:
    adapters, longest = step.pages.shape
    of_token = step.of_slot[slots]
    of_token = of_token.where((of_token >= 0) & (of_token < adapters), adapters)
    pages, owners = step.ranks.new_zeros((2, min(len(slots), adapters) * longest))
    used = 0
    for adapter in of_token[of_token < adapters].unique().tolist():
        end = used + int(step.ranks[adapter]) // RANKS
        pages[used:end] = step.pages[adapter, : end - used]
        owners[used:end] = adapter
        used = end
    counters = step.ranks.new_zeros(MAX_PARTS * -(-len(pages) * RANKS // BLOCK_R))
    return JoinedRanks(of_token, pages, owners, step.ranks.new_full((1,), used), counters)


def shrink(x: torch.Tensor, weights: LoraWeights, ranks: JoinedRanks) -> Shrunk:
    used = int(ranks.used)
    hidden = x.new_zeros((len(weights.outputs), len(x), ranks.tiles * BLOCK_R))
    # [parts, ranks, inputs]
    a = weights.a[ranks.pages[:used].long()].transpose(0, 1).flatten(1, 2).float()
    own = ranks.of_token[:, None] == ranks.owners[:used].repeat_interleave(RANKS)
    hidden[..., : used * RANKS] = (
        torch.einsum("ti,pri->ptr", x.float(), a).where(own, 0.0).to(x.dtype)
    )
    return Shrunk(hidden, weights, ranks)


def expand(shrunk: Shrunk, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(out.float() + expanded_products(shrunk))


def expand_and_gate(shrunk: Shrunk, product: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = (product.float() + expanded_products(shrunk)).to(product.dtype).chunk(2, -1)
    return (apply_activation(gate.float(), activation).to(product.dtype).float() * up.float()).to(
        product.dtype
    )


def expanded_products(shrunk: Shrunk) -> torch.Tensor:
    """Returns shrunk inputs times B, float32 [T, outputs]."""
    weights = shrunk.weights
    used = int(shrunk.ranks.used)
    b = weights.b[shrunk.ranks.pages[:used].long()].flatten(0, 1).float()  # [ranks, outputs]
    hidden = shrunk.hidden[..., : used * RANKS].float()
    return torch.cat(
        [own @ part for own, part in zip(hidden, b.split_with_sizes(weights.outputs, 1))], 1
    )
