"""Torch twin of `kernels.lora`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.lora import LoraRows
from sglang_lite.runtime.kernels.lora_weights import LoraStep, LoraWeights
from sglang_lite.runtime.kernels.reference.activation import apply_activation
from sglang_lite.runtime.kernels.reference.experts_order import experts_order


def lora_rows(step: LoraStep, slots: torch.Tensor) -> LoraRows:
    adapters = len(step.ranks)
    blocks = experts_order(
        step.of_slot[slots].unsqueeze(1), adapters + 1, 16 if len(slots) <= 256 else 64
    )
    of = blocks.experts.long()
    has = (of >= 0) & (of < adapters)
    count = (of >= 0).sum()
    own = of.where(has, 0)
    return LoraRows(
        blocks,
        step.pages[own] * has.unsqueeze(1),
        step.ranks[own] * has,
        torch.stack((has.sum(), count)).int(),
    )


def lora_add(
    x: torch.Tensor, weights: LoraWeights, rows: LoraRows, out: torch.Tensor
) -> torch.Tensor:
    return out.copy_(_add_products(x, weights, rows, out))


def lora_add_and_gate(
    x: torch.Tensor, weights: LoraWeights, rows: LoraRows, product: torch.Tensor, activation: str
) -> torch.Tensor:
    gate, up = _add_products(x, weights, rows, product).to(x.dtype).chunk(2, -1)
    return (apply_activation(gate.float(), activation).to(x.dtype).float() * up.float()).to(x.dtype)


def _add_products(
    x: torch.Tensor, weights: LoraWeights, rows: LoraRows, out: torch.Tensor
) -> torch.Tensor:
    """Returns `out` plus the adapters' contributions for x, in float32."""
    total = out.float()
    tokens = rows.blocks.pairs.view(-1, rows.blocks.size)
    for block in range(int(rows.used[0])):
        at = tokens[block]
        rank = int(rows.ranks[block])
        pages = rows.pages[block].long()
        at = at[at < len(x)].long()
        # [parts, rank, inputs]
        a = weights.a[pages].transpose(0, 1).flatten(1, 2)[:, :rank].float()
        b = weights.b[pages].flatten(0, 1)[:rank].float()  # [rank, outputs]
        hidden = torch.einsum("ti,pri->ptr", x[at].float(), a).to(x.dtype).float()
        parts = [
            own @ columns for own, columns in zip(hidden, b.split_with_sizes(weights.outputs, 1))
        ]
        total[at] += torch.cat(parts, 1)
    return total
