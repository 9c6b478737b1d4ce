"""Scales of 8-bit keys and values: from the checkpoint, or measured in a trial run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendRow
from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from sglang_lite.runtime.kernels.kv_layout import KVLayout
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.spec import LatentSpec

_TOKENS = 512  # tokens of the trial run
# Other texts may have larger keys and values than the trial's. Headroom is cheap: e4m3 keeps full
# precision down to 1/28,672 of its largest number, so with this headroom, down to 1/3,584 of a
# head's largest value at worst.
_HEADROOM = 4


def read_kv_scales(path: Path, layout: KVLayout) -> dict[tuple[int, str], torch.Tensor]:
    """Reads the scales of keys and values from a file in the format of SGLang's
    `quantization_param_path`. Returns them as [kv_heads], by layer and "k" or "v".

    The file has a number for each layer of rank 0: `{"kv_cache": {"dtype": "float8_e4m3fn",
    "scaling_factor": {"0": {"0": 0.02, …}}}}`.

    Raises:
        ModelError: the file can't be read, or has other content.
    """
    try:
        cache = json.loads(path.read_text(encoding="utf-8"))["kv_cache"]
        kind = cache["dtype"]
        ranks = dict(cache["scaling_factor"])
        of_layers = {int(layer): float(scale) for layer, scale in dict(ranks.pop("0")).items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{path}: no scales of keys and values can be read: {type(error).__name__}: {error}.",
            hint='It has to look like {"kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"0": 0.02}}}}.',
        ) from error
    heads = {layer: planes[0].heads for layer, planes in enumerate(layout.layers)}
    problem = None
    if kind != "float8_e4m3fn":
        problem = f"kv_cache.dtype is {kind!r}, and keys and values are float8_e4m3fn"
    elif ranks:
        problem = f"kv_cache.scaling_factor is of {len(ranks) + 1} devices, and this engine has one"
    elif of_layers.keys() != heads.keys():
        problem = f"kv_cache.scaling_factor has {len(of_layers)} layers, and the model 0 to {len(heads) - 1}"
    elif wrong := [layer for layer, scale in of_layers.items() if not 0 < scale < float("inf")]:
        problem = (
            f"the scale of layer {wrong[0]} is {of_layers[wrong[0]]}, and no finite number above 0"
        )
    if problem:
        raise ModelError(f"{path}: {problem}.", hint="Leave quantization_param_path out.")
    return {
        (layer, side): torch.full((heads[layer],), scale)
        for layer, scale in of_layers.items()
        for side in "kv"
    }


@torch.inference_mode()
def kv_scales(
    model: Decoder, stored: Mapping[tuple[int, str], torch.Tensor], bos: int | None
) -> KVScales:
    """Returns the scales of an 8-bit KV cache, rounded up to powers of two.

    Missing scales are found by a trial: the model is run once on a fixed sequence of tokens.

    Args:
        model: model with loaded weights.
        stored: scales [kv_heads] of the checkpoint by layer and "k" or "v", as
            `WeightSource.kv_scales` returns them.
        bos: token that begins a sequence, or None.

    Raises:
        ModelError: keys or values of the trial are NaN or infinite.
    """
    layers = range(len(model.kv_layout.layers))
    if any((i, side) not in stored for i in layers for side in "kv"):
        stored = {**_calibrate_scales(model, bos), **stored}
    k, v = (
        [_round_up_to_power_of_two(stored[i, side]).to(model.device) for i in layers]
        for side in "kv"
    )
    for i, layer in enumerate(model.spec.layers):
        # a checkpoint has one scale for all parts of the cache
        if isinstance(layer.attention, LatentSpec):
            k[i] = k[i].expand(2).contiguous()
            v[i] = k[i][:1]
    return KVScales(tuple(k), tuple(v))


def _calibrate_scales(model: Decoder, bos: int | None) -> dict[tuple[int, str], torch.Tensor]:
    """Measures scales [kv_heads], by layer and "k" or "v", in a trial run on tokens spread evenly
    over the vocabulary.

    For latent attention, the shapes are those of `KVScales`.
    """
    layout = model.kv_layout
    device = model.device
    count = min(_TOKENS, model.max_positions)
    at = torch.arange(count, device=device)
    ids = at * model.vocab_size // count
    if bos is not None:
        ids[0] = bos
    cache = KVCache.allocate(layout, count, model.precision.compute, device)
    model.forward(ids, at, AttentionPlan(at, (), (ExtendRow(0, count, slice(0, count)),)), cache)
    largest = {}
    for i, layer in enumerate(model.spec.layers):
        attention = layer.attention
        k = cache.k[i].abs()
        v = cache.v[i].abs()
        largest[i, "k"] = k.amax((1, 2))
        largest[i, "v"] = v.amax((1, 2))
        if isinstance(attention, LatentSpec):
            largest[i, "k"] = torch.stack(
                [
                    part.amax()
                    for part in k.split_with_sizes((attention.rank, attention.rope_size), 2)
                ]
            )
    found = {name: x.float().cpu() for name, x in largest.items()}
    if not all(x.isfinite().all() for x in found.values()):
        raise ModelError(
            "keys or values of this model are NaN or infinite, so no scales of theirs can be found.",
            hint='Use kv_dtype="auto", or another dtype.',
        )
    return {
        name: x * (_HEADROOM / torch.finfo(model.precision.cache).max) for name, x in found.items()
    }


def _round_up_to_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Rounds x up to a power of two from 2^-100 to 2^100, by which float32 numbers can be divided.
    Returns 1 for 0.
    """
    mantissa, exponent = np.frexp(x.numpy())
    return torch.from_numpy(
        np.ldexp(np.float32(1), np.clip(exponent - (mantissa == 0.5), -100, 100))
    )
