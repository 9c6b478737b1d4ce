"""Decoder layers over concatenated texts, each read once as a whole; keys and values are not kept between calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from sglang_lite.runtime.embedding.lengths import positions
from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan, ExtendRow
from sglang_lite.runtime.kernels.kv_cache import KVCache
from sglang_lite.runtime.kernels.kv_layout import KVLayout
from sglang_lite.runtime.models.decoder import Decoder
from sglang_lite.runtime.models.precision import Precision
from sglang_lite.runtime.models.spec import ModelSpec
from sglang_lite.runtime.models.weights.source import WeightSource


class PackedDecoder:
    """Decoder without its head, used as the layers of an encoder.

    Args:
        spec: specification of the decoder.
        source: source of the weights.
        dtype, device: dtype and device of weights and activations.
        limit: largest number of tokens of a text.
        progress: wraps the iteration over layers while they are loaded.

    Raises:
        ModelError: a tensor is missing, has a wrong shape, or is not used by the model.
    """

    def __init__(
        self,
        spec: ModelSpec,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device,
        limit: int,
        progress: Callable[[Iterable[int]], Iterable[int]],
    ) -> None:
        self._decoder = Decoder(spec, source, Precision(dtype, dtype, dtype), device, limit, progress, head=False)

    def __call__(self, ids: NDArray[np.int32], types: NDArray[np.int32], lengths: list[int]) -> torch.Tensor:
        """Computes hidden states [T, hidden_size]. Takes the arguments of `Bert`; token types are ignored."""
        ends = pairwise(accumulate(lengths, initial=0))
        rows = tuple(ExtendRow(start, end, slice(start, end)) for start, end in ends)
        plan = AttentionPlan(torch.arange(len(ids)), (), rows)
        at, where = (torch.from_numpy(a.astype(np.int64)) for a in (ids, positions(lengths)))
        return self._decoder.forward(at, where, plan, self._cache(len(ids)))

    def _cache(self, tokens: int) -> KVCache:
        """Cache with room for one layer, shared by all layers: each layer is done reading before the next one
        writes."""
        dtype, device = self._decoder.precision.cache, self._decoder.device
        layers = self._decoder.kv_layout.layers
        rooms = {planes: KVCache.allocate(KVLayout((planes,)), tokens, dtype, device) for planes in set(layers)}
        return KVCache(tuple(rooms[planes].k[0] for planes in layers), tuple(rooms[planes].v[0] for planes in layers))
