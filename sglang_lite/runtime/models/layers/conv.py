"""Gated short convolution (LFM2, arXiv:2511.23404) on a CPU. `ConvSpec` has the formula."""

from __future__ import annotations

import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan
from sglang_lite.runtime.kernels.kv_cache import KVCache


def gated_conv(
    kernel: torch.Tensor, product: torch.Tensor, plan: AttentionPlan, cache: KVCache, layer: int
) -> torch.Tensor:
    """Stores the new tokens' inputs of a convolution in the cache, and convolves them with those of
    the tokens before.

    Args:
        kernel: float32 [window + 1, channels], as `Layer.kernel`.
        product: projections b, c and x [T, 3 * channels].
        plan: plan of the step for the layer, whose `previous` covers the window.
        cache: KV cache.
        layer: index of the layer.

    Returns:
        Outputs [T, channels], in the data type of `product`.
    """
    b, c, x = product.chunk(3, 1)
    inputs = b * x
    plane = cache.k[layer][0]
    plane.index_copy_(0, plan.store_at, inputs.to(plane.dtype))
    *earlier, last, bias = kernel
    out = torch.addcmul(bias, inputs.float(), last)
    for distance, weight in enumerate(reversed(earlier)):
        assert plan.previous is not None
        at = plan.previous[:, distance]
        before = plane[at.clamp(min=0)].float()
        out.addcmul_(before.masked_fill_((at < 0).unsqueeze(1), 0.0), weight)
    return out.to(product.dtype) * c
