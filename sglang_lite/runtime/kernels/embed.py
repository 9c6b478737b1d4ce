"""Embeddings of tokens, and features of images that take the place of embeddings. A token's id is
known, or was drawn by the previous step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import first_kernel_options, pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2


@cached_launch
@triton.jit
def _embed(
    ids,
    slots,
    last_tokens,
    table,
    features,
    features_stride,
    out,
    size,
    scale,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    id = tl.load(ids + token)
    if id == -1:
        id = tl.load(last_tokens + tl.load(slots + token))
    rows, stride = table, size
    if id < 0:
        rows, stride = features, features_stride
        id = -2 - id
        scale = 1.0
    row = tl.load(rows + id.to(tl.int64) * stride + at, mask=at < size)
    tl.store(
        out + token * size + at,
        (row.to(tl.float32) * scale).to(out.dtype.element_ty),
        mask=at < size,
    )


def embed(
    plan: DevicePlan, table: torch.Tensor, scale: float, features: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the embeddings [T, H] of the plan's tokens: rows of table [V, H] times `scale`. For
    ids below -1, returns the first H elements of rows of features [R, …] instead. Moves 2 T H
    elements.
    """
    size = table.shape[1]
    out = torch.empty((len(plan.ids), size), dtype=table.dtype, device=table.device)
    block = min(1024, round_up_to_power_of_2(size))
    rows = table if features is None else features
    _embed[(len(out), cdiv(size, block))](
        plan.ids,
        plan.slots,
        plan.last_tokens,
        table,
        rows,
        rows.shape[1],
        out,
        size,
        scale,
        BLOCK=block,
        **first_kernel_options(out.device),
    )
    return out


@cached_launch
@triton.jit
def _add_features(
    ids, features, features_stride, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    start_next(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = -2 - tl.load(ids + token)
    if row < 0:
        return
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    to = out + token * size + at
    added = tl.load(features + row.to(tl.int64) * features_stride + at, mask=at < size)
    tl.store(to, tl.load(to, mask=at < size) + added, mask=at < size)


def add_features(plan: DevicePlan, features: torch.Tensor, plane: int, out: torch.Tensor) -> None:
    """Adds features of images to the hidden states `out` [T, H] of their tokens. `plane` selects
    which H elements of each row of features [R, …] are added. Moves at most 3 T H elements.
    """
    size = out.shape[1]
    block = min(1024, round_up_to_power_of_2(size))
    _add_features[(len(out), cdiv(size, block))](
        plan.ids,
        features[:, plane * size :],
        features.shape[1],
        out,
        size,
        BLOCK=block,
        **pdl_options(out.device),
    )
