"""Keys and values of a model's layers as tensors, with the scales of 8-bit ones. Knows no pages and no requests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from mmap import mmap

import numpy as np
import torch

from sglang_lite.runtime.kernels.kv_layout import KVLayout, Plane


@dataclass(frozen=True, slots=True)
class KVScales:
    """Divisors of keys and values in 8 bits: powers of two, which change no digit.

    Queries come to attention multiplied by the scale of the keys that they meet, so attention does without it. Its
    result it multiplies by the scale of the values. Scales are a model's, not a page's: whoever copies, shares or drops
    pages need not know of them. Absorbed queries come as they are: attention multiplies by the scales of latents, too.

    Attributes:
        k, v: per layer float32 [kv_heads]; of latents [2], the latents' and that of the keys' turned part, and [1].
    """

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every layer by token slot.

    Attributes:
        k, v: per layer [heads, slots, size], as a `KVLayout` has its planes; a head's slots lie side by side, so that
            reading a sequence is one gather of rows and what it gives is a batch of matrices. A layer's values are its
            keys' tensor where it has one plane.
        scales: of keys and values in 8 bits; None: they are stored as they are.
    """

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    scales: KVScales | None = None

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """All tensors, each once."""
        return (*self.k, *(v for k, v in zip(self.k, self.v) if v is not k))

    @staticmethod
    def allocate(
        layout: KVLayout, slots: int, dtype: torch.dtype, device: torch.device, scales: KVScales | None = None
    ) -> KVCache:
        """A cache of zeros: padding reads slots that nothing was stored in, and 0 x NaN would be NaN."""

        def tensor(plane: Plane) -> torch.Tensor:
            shape = (plane.heads, slots, plane.size)
            if device.type != "cpu":
                return torch.zeros(shape, dtype=dtype, device=device)
            # Pages that are mapped when they are first touched; the heap of a thread may write zeros at once.
            data = np.frombuffer(mmap(-1, math.prod(shape) * dtype.itemsize), dtype=np.uint8)
            return torch.from_numpy(data).view(dtype).view(shape)

        layers = [[tensor(plane) for plane in planes] for planes in layout.layers]
        return KVCache(tuple(planes[0] for planes in layers), tuple(planes[-1] for planes in layers), scales)


def by_kv_head(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x [T, heads, head_dim] times the scales [kv_heads] of its heads' KV heads, in the format of x."""
    return (x * scales.repeat_interleave(x.shape[1] // len(scales)).unsqueeze(1)).to(x.dtype)


def latent_scales(scales: torch.Tensor, rank: int, turned: int) -> torch.Tensor:
    """The scale of each number [rank + turned] of a latent with its turned part, of `KVScales.k`'s two."""
    return torch.cat((scales[:1].expand(rank), scales[1:].expand(turned)))


def scaled_by_latents(x: torch.Tensor, scales: torch.Tensor, rank: int) -> torch.Tensor:
    """x […, rank + turned] times the scales of latents, `KVScales.k`'s two, in the format of x."""
    return (x * latent_scales(scales, rank, x.shape[-1] - rank)).to(x.dtype)


def gather(cache: torch.Tensor, at: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Keys or values of token slots `at`, for products in `dtype`."""
    if cache.dtype == dtype:
        return cache.index_select(1, at)
    return indexable(cache).index_select(1, at).view(cache.dtype).to(dtype)


def indexable(x: torch.Tensor) -> torch.Tensor:
    """View of the memory in a format that torch can index by a tensor."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
