"""Sequences of latents for tests of kernels, and scales of such in 8 bits."""

import torch

from sglang_lite.runtime.kernels.kv_cache import KVCache, KVScales
from tests.runtime.kernels.test_kernels import DEVICE, PAGE, Rows


class Latents(Rows):
    """Sequences of latents with rotary keys, in random pages."""

    def __init__(self, lengths, heads, rank, rope_dim, dtype=torch.float32, page=PAGE):
        super().__init__(lengths, (heads, 1), rank + rope_dim, dtype, page=page)
        self.cache = KVCache(self.cache.k, self.cache.k)


LATENT_SCALES = KVScales(
    (torch.tensor([0.5, 4.0], device=DEVICE),), (torch.tensor([0.5], device=DEVICE),)
)
