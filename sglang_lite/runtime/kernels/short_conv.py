"""Gated short convolution (LFM2, arXiv:2511.23404), fused with the store of its inputs.

    plane[slot] = b * x                                                 of each token
    out = c * (bias + sum over k of kernel[k] * (b * x)[t - W + 1 + k])

The inputs of earlier tokens are computed again if those are in the step, and read from the cache if
not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.attention_metadata import DevicePlan
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

_BLOCK = 512  # channels of a program


@triton.jit
def _step_inputs(product, token, channel, inside, CHANNELS: tl.constexpr):
    """Returns b * x of some channels of a token of the step."""
    row = product + token * 3 * CHANNELS + channel
    b = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(row + 2 * CHANNELS, mask=inside, other=0.0).to(tl.float32)
    return (b * x).to(product.dtype.element_ty)


@cached_launch
@triton.jit
def _short_conv(
    product,
    kernel,
    slots,
    positions,
    page_table,
    pages_per_slot,
    plane,
    out,
    CHANNELS: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    own = _step_inputs(product, token, channel, inside, CHANNELS)
    page = tl.load(page_table + slot * pages_per_slot + position // PAGE).to(tl.int64)
    target = plane + (page * PAGE + position % PAGE) * CHANNELS + channel
    tl.store(target, own.to(plane.dtype.element_ty), mask=inside)
    total = tl.load(kernel + WINDOW * CHANNELS + channel, mask=inside, other=0.0)
    weight = tl.load(kernel + (WINDOW - 1) * CHANNELS + channel, mask=inside, other=0.0)
    total += own.to(tl.float32) * weight
    for distance in tl.static_range(1, WINDOW):
        before = tl.maximum(token - distance, 0)
        at = position - distance
        same = (token >= distance) & (tl.load(slots + before) == slot)
        same &= tl.load(positions + before) == at
        new = _step_inputs(product, before, channel, inside & same, CHANNELS)
        cached = (at >= 0) & (same == 0)
        place = tl.maximum(at, 0)
        page = tl.load(page_table + slot * pages_per_slot + place // PAGE).to(tl.int64)
        source = plane + (page * PAGE + place % PAGE) * CHANNELS + channel
        old = tl.load(source, mask=inside & cached, other=0.0)
        weight = tl.load(
            kernel + (WINDOW - 1 - distance) * CHANNELS + channel, mask=inside, other=0.0
        )
        total += (new.to(tl.float32) + old.to(tl.float32)) * weight
    c = tl.load(product + token * 3 * CHANNELS + CHANNELS + channel, mask=inside, other=0.0)
    total = total.to(product.dtype.element_ty).to(tl.float32) * c.to(tl.float32)
    tl.store(out + token * CHANNELS + channel, total.to(out.dtype.element_ty), mask=inside)


def short_conv(
    product: torch.Tensor, kernel: torch.Tensor, plan: DevicePlan, cache: KVCache, layer: int
) -> torch.Tensor:
    """Stores the new tokens' inputs of a convolution, and convolves them with earlier ones.

    Args:
        product: projections b, c and x [T, 3 * channels], contiguous.
        kernel: float32 [window + 1, channels], the kernel, and then its bias.
        plan: plan of the step, for layers with a window.
        cache: cache whose plane of the layer is [1, slots, channels] (written).
        layer: index of the layer.

    Returns:
        Outputs [T, channels]. Moves T (3 + window) channels elements, and up to 2 (window - 1) more
        where earlier tokens are in the step.
    """
    window = len(kernel) - 1
    channels = kernel.shape[1]
    block = min(_BLOCK, round_up_to_power_of_2(channels))
    out = product.new_empty((len(product), channels))
    _short_conv[(len(product), cdiv(channels, block))](
        product,
        kernel,
        plan.slots,
        plan.positions,
        plan.page_table,
        plan.page_table.shape[1],
        cache.k[layer],
        out,
        CHANNELS=channels,
        WINDOW=window,
        PAGE=plan.page_size,
        BLOCK=block,
        num_warps=4,
        **pdl_options(product.device),
    )
    return out
