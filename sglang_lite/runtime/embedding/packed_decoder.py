"""Layers of a decoder over texts that lie one after another, each read once and whole: nothing is kept of them."""

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
    """
    Args:
        spec: its shape.
        source: of its weights.
        dtype, device: of weights and activations.
        limit: tokens of a text.
        progress: gets the layers that are loaded and gives them back one by one.

    Raises:
        ModelError: a tensor is missing, over, or of another shape.
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
        """Hidden states [T, hidden_size]. Arguments as of `Bert`; a decoder knows no types."""
        ends = pairwise(accumulate(lengths, initial=0))
        rows = tuple(ExtendRow(start, end, slice(start, end)) for start, end in ends)
        plan = AttentionPlan(torch.arange(len(ids)), (), rows)
        at, where = (torch.from_numpy(a.astype(np.int64)) for a in (ids, positions(lengths)))
        return self._decoder.forward(at, where, plan, self._cache(len(ids)))

    def _cache(self, tokens: int) -> KVCache:
        """Room for one layer's keys and values, which all layers share: each has read them when the next one writes."""
        dtype, device = self._decoder.precision.cache, self._decoder.device
        layers = self._decoder.kv_layout.layers
        rooms = {planes: KVCache.allocate(KVLayout((planes,)), tokens, dtype, device) for planes in set(layers)}
        return KVCache(tuple(rooms[planes].k[0] for planes in layers), tuple(rooms[planes].v[0] for planes in layers))
