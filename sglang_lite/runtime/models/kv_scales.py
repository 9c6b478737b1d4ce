"""Divisors of keys and values in 8 bits: a checkpoint's own, else those that a trial finds."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendRow
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.spec import LatentSpec

_TOKENS = 512  # of the trial
# Other texts have larger keys and values than the trial's. Room for those is cheap: numbers keep all their digits down
# to a 28,672nd of e4m3's largest, so with this, down to a 3,584th of a head's largest at worst.
_HEADROOM = 4


@torch.inference_mode()
def kv_scales(model: Decoder, given: Mapping[tuple[int, str], torch.Tensor], bos: int | None) -> KVScales:
    """The scales of a model whose cache has 8 bits, rounded up to powers of two.

    Args:
        given: what `WeightSource.kv_scales` read. What is not there is found by a trial: the model is run once, on the
            same tokens whenever the model is the same.
        bos: the token that texts begin with, where there is one.

    Raises:
        ModelError: the trial's keys or values are NaN or infinite.
    """
    layers = range(len(model.kv_layout.layers))
    if any((i, side) not in given for i in layers for side in "kv"):
        given = {**_tried(model, bos), **given}
    k, v = ([_power_of_two(given[i, side]).to(model.device) for i in layers] for side in "kv")
    for i, layer in enumerate(model.spec.layers):
        if isinstance(layer.attention, LatentSpec):  # of which a checkpoint has one scale
            k[i] = k[i].expand(2).contiguous()
            v[i] = k[i][:1]
    return KVScales(tuple(k), tuple(v))


def _tried(model: Decoder, bos: int | None) -> dict[tuple[int, str], torch.Tensor]:
    """Scales [kv_heads] by layer and "k" or "v", from tokens that are spread over the vocabulary; of latents as in
    `KVScales`."""
    layout, device = model.kv_layout, model.device
    count = min(_TOKENS, model.max_positions)
    at = torch.arange(count, device=device)
    ids = at * model.vocab_size // count
    if bos is not None:
        ids[0] = bos
    cache = KVCache.allocate(layout, count, model.precision.compute, device)
    model.forward(ids, at, AttentionPlan(at, (), (ExtendRow(0, count, slice(0, count)),)), cache)
    largest = {}
    for i, layer in enumerate(model.spec.layers):
        attention, k, v = layer.attention, cache.k[i].abs(), cache.v[i].abs()
        largest[i, "k"], largest[i, "v"] = k.amax((1, 2)), v.amax((1, 2))
        if isinstance(attention, LatentSpec):
            largest[i, "k"] = torch.stack(
                [part.amax() for part in k.split_with_sizes((attention.rank, attention.rope_size), 2)]
            )
    found = {name: x.float().cpu() for name, x in largest.items()}
    if not all(x.isfinite().all() for x in found.values()):
        raise ModelError(
            "keys or values of this model are NaN or infinite, so no scales of theirs can be found.",
            hint='Use kv_dtype="auto", or another dtype.',
        )
    return {name: x * (_HEADROOM / torch.finfo(model.precision.cache).max) for name, x in found.items()}


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The least one that is not below x, but 1 for 0, and none that float32 can't divide by."""
    mantissa, exponent = np.frexp(x.numpy())
    return torch.from_numpy(np.ldexp(np.float32(1), np.clip(exponent - (mantissa == 0.5), -100, 100)))
