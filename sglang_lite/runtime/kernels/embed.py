"""Embeddings of tokens whose ids are known or were drawn by the previous step, and of features of images."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import first_kernel_options, start_next
from sglang_lite.runtime.kernels.sizes import cdiv, power_of_2


@cached_launch
@triton.jit
def _embed(ids, slots, last_tokens, table, features, out, size, scale, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids + token)
    if id == -1:
        id = tl.load(last_tokens + tl.load(slots + token))
    rows = table
    if id < 0:
        rows = features
        id = -2 - id
        scale = 1.0
    row = tl.load(rows + id.to(tl.int64) * size + at, mask=at < size)
    tl.store(out + token * size + at, (row.to(tl.float32) * scale).to(out.dtype.element_ty), mask=at < size)


def embed(plan: DevicePlan, table: torch.Tensor, scale: float, features: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the rows of table [V, H] for the plan's tokens, times `scale`, or those of features [R, H] for ids below
    -1: [T, H]. Moves 2 T H elements."""
    size = table.shape[1]
    out = torch.empty((len(plan.ids), size), dtype=table.dtype, device=table.device)
    block = min(1024, power_of_2(size))
    _embed[(len(out), cdiv(size, block))](
        plan.ids, plan.slots, plan.last_tokens, table, table if features is None else features, out, size, scale,
        BLOCK=block, **first_kernel_options(out.device),
    )  # fmt: skip
    return out
