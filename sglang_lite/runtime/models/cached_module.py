"""Base for models whose layers are transformers modules, with keys and values in our KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from sglang_lite.runtime.kernels.kv_layout import KVLayout
from sglang_lite.runtime.kernels.reference.kv_copy import copy_kv
from sglang_lite.runtime.parallel.shared_steps import UNSHARED


class CachedModule(ABC):
    """Base for models built from transformers modules; subclasses supply the layers.

    Attributes:
        dtype, device: data type and device of the weights and the computation.
        kv_layout: layout of the KV cache.
    """

    dtype: torch.dtype
    device: torch.device
    kv_layout: KVLayout

    spec = parts = None
    window = None  # layers with a window share the other layers' pages
    window_bytes = 0
    state_bytes = 0
    logit_softcap = None  # the module's own head applies any soft cap
    steps = UNSHARED
    rope_axes: torch.Tensor | None = None
    kv_scales: KVScales | None = None

    @property
    def batch_sensitive(self) -> bool:
        return self.dtype.itemsize < 4

    @property
    def format(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def token_bytes(self) -> int:
        return self.kv_layout.numbers * self.dtype.itemsize

    def allocate_cache(self, slots: int, window_slots: int = 0, states: int = 0) -> KVCache:
        return KVCache.allocate(self.kv_layout, slots, self.dtype, self.device)

    def copy_slots(self, cache: KVCache, source: torch.Tensor, target: torch.Tensor) -> None:
        copy_kv(cache, source, target)

    def finish_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns float32 logits [R, V] of hidden states [R, hidden_size]."""
        return self.raw_logits(hidden).float()

    @abstractmethod
    def raw_logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns logits [R, V] in the head's dtype, written to `out` if given."""
