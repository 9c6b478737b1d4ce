"""Torch twin of `kernels.lora`."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.lora import LoraRows
from sglang_lite.runtime.kernels.lora_weights import LoraWeights
from sglang_lite.runtime.kernels.reference.activation import apply_activation


def lora_add(x: torch.Tensor, weights: LoraWeights, rows: LoraRows, out: torch.Tensor) -> torch.Tensor:
    return out.copy_(_added(x, weights, rows, out))


def lora_gated(
    x: torch.Tensor, weights: LoraWeights, rows: LoraRows, product: torch.Tensor, activation: str
) -> torch.Tensor:
    gate, up = _added(x, weights, rows, product).to(x.dtype).chunk(2, -1)
    return (apply_activation(gate.float(), activation).to(x.dtype).float() * up.float()).to(x.dtype)


def _added(x: torch.Tensor, weights: LoraWeights, rows: LoraRows, out: torch.Tensor) -> torch.Tensor:
    """Sum float32 of `out` and the adapters' products of x."""
    total, pairs = out.float(), rows.blocks.pairs.view(-1, rows.blocks.size)
    for adapter, block in zip(rows.blocks.experts.tolist(), pairs):
        if not 0 <= adapter < len(rows.ranks):
            continue
        tokens, rank = block[block < len(x)].long(), int(rows.ranks[adapter])
        pages = rows.pages[adapter].long()
        a = weights.a[pages].transpose(0, 1).flatten(1, 2)[:, :rank].float()  # [parts, rank, inputs]
        b = weights.b[pages].flatten(0, 1)[:rank].float()  # [rank, outputs]
        hidden = torch.einsum("ti,pri->ptr", x[tokens].float(), a).to(x.dtype).float()
        parts = [rows_of @ columns for rows_of, columns in zip(hidden, b.split_with_sizes(weights.outputs, 1))]
        total[tokens] += torch.cat(parts, 1)
    return total
