"""Keys and values of a model's layers as tensors, with the scales of 8-bit formats. Independent of
pages and requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from sglang_lite.runtime.kernels.arena import Arena, HostArena
from sglang_lite.runtime.kernels.kv_layout import KVLayout

NOTHING_RECORDED: Mapping[str, tuple[int, int, torch.dtype]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class KVScales:
    """Divisors of 8-bit keys and values. They are powers of two, so that scaling rounds nothing.

    Queries are passed to attention already multiplied by the scale of their keys; attention
    multiplies its result by the scale of the values. For latents, attention applies both scales,
    and absorbed queries are passed unscaled. Scales belong to a model, not to pages, so code that
    copies, shares or drops pages need not handle them.

    Attributes:
        k, v: float32 [kv_heads] for each layer; for latents [2], the scales of the latents and of
            the keys' rotary part, and [1].
    """

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class LayerStates:
    """States of sequences in one layer, by place.

    Attributes:
        tails: [places, tokens, channels], earlier inputs of the convolution, oldest first.
        sums: [places, *shape], float32 or bfloat16.
    """

    tails: torch.Tensor
    sums: torch.Tensor


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every layer by token slot.

    Attributes:
        k, v: [heads, slots, size] for each layer, sized by its planes in the `KVLayout`. The slots
            of a head are contiguous, so reading a sequence is one gather of rows that yields a
            batch of matrices. For a layer with a single plane, both are the same tensor.
        scales: scales of 8-bit keys and values; None if they are stored unscaled.
        windowed: True for each layer whose token slots are of pages for layers with a window; empty
            if those are the same for all layers.
        memory: memory of the tensors, if it can be released.
        experts: int32 [layers, slots, top_k], experts that each token passed through in each layer,
            0 in layers without any; None if they are not recorded.
        hidden: [1, slots, hidden_size], hidden state of each token after the last norm; None if it
            is not recorded.
        states: states of each recurrent layer, None for other layers; empty if no layer is
            recurrent.
    """

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    scales: KVScales | None = None
    windowed: tuple[bool, ...] = ()
    memory: Arena | None = None
    experts: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    states: tuple[LayerStates | None, ...] = ()

    def of_kind(self, *, windowed: bool) -> KVCache:
        """Returns a cache with only one kind of layers: those with a window if `windowed`, else
        those without one. Layers of one kind share token slots. Those that keep nothing by token
        are left out. The cache has no scales, and has recorded tensors only if not `windowed`.
        """
        kinds = self.windowed or (False,) * len(self.k)
        layers = [i for i, kind in enumerate(kinds) if kind is windowed and self.k[i].shape[2] > 0]
        k, v = (tuple(side[i] for i in layers) for side in (self.k, self.v))
        return (
            KVCache(k, v) if windowed else KVCache(k, v, experts=self.experts, hidden=self.hidden)
        )

    @property
    def planes(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the cache that hold something by token, each of them once."""
        recorded = (each for each in (self.experts, self.hidden) if each is not None)
        all_planes = (*self.k, *(v for k, v in zip(self.k, self.v) if v is not k), *recorded)
        return tuple(plane for plane in all_planes if plane.shape[2] > 0)

    @property
    def state_planes(self) -> tuple[torch.Tensor, ...]:
        """The states of all layers as bytes, uint8 [1, places, bytes of a state] each. They share
        the states' memory.
        """
        tensors = (
            tensor
            for layer in self.states
            if layer is not None
            for tensor in (layer.tails, layer.sums)
        )
        return tuple(
            tensor.flatten(1).view(torch.uint8).unsqueeze(0) for tensor in tensors if tensor.numel()
        )

    def record_experts(self, layer: int, at: torch.Tensor, chosen: torch.Tensor) -> None:
        """Records the experts `chosen` [T, top_k] for the tokens in slots `at`, int64 [T]. Does
        nothing if the cache doesn't record experts.
        """
        if self.experts is not None:
            self.experts[layer, :, : chosen.shape[1]].index_copy_(0, at, chosen.int())

    def record_hidden(self, at: torch.Tensor, hidden: torch.Tensor) -> None:
        """Records the hidden states [T, hidden_size] of the tokens in slots `at`, int64 [T]. Does
        nothing if the cache doesn't record hidden states.
        """
        if self.hidden is not None:
            self.hidden[0].index_copy_(0, at, hidden)

    @staticmethod
    def allocate(
        layout: KVLayout,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: KVScales | None = None,
        window_slots: int = 0,
        arena: Arena | None = None,
        recorded: Mapping[str, tuple[int, int, torch.dtype]] = NOTHING_RECORDED,
    ) -> KVCache:
        """Allocates a cache filled with zeros. Padding reads slots that were never written, and a
        NaN there would spoil results, since 0 x NaN is NaN.

        Args:
            layout: planes of a token.
            slots: number of token slots.
            dtype, device: data type and device of the tensors.
            scales: as the attribute.
            window_slots: number of token slots in the layers that have a window; 0 for `slots`.
            arena: memory for the tensors; None for that of torch, or on a CPU for a new
                `HostArena`.
            recorded: heads, size and data type of what is recorded for each token, by attribute.
        """
        if arena is None and device.type == "cpu":
            arena = HostArena()

        def zeros(heads: int, slots: int, size: int, dtype: torch.dtype) -> torch.Tensor:
            shape = (heads, slots, size)
            return (
                torch.zeros(shape, dtype=dtype, device=device)
                if arena is None
                else arena.zeros(shape, dtype)
            )

        windowed = tuple(window is not None for window in layout.windows) if window_slots else ()
        counts = [window_slots if kind else slots for kind in windowed] or [slots] * len(
            layout.layers
        )
        layers = [
            [zeros(plane.heads, count, plane.size, dtype) for plane in planes]
            for planes, count in zip(layout.layers, counts)
        ]
        k, v = (tuple(planes[at] for planes in layers) for at in (0, -1))
        more = {
            name: zeros(heads, slots, size, kind) for name, (heads, size, kind) in recorded.items()
        }
        return KVCache(k, v, scales, windowed, arena, more.get("experts"), more.get("hidden"))


def scale_by_kv_head(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiplies x [T, heads, head_dim] by the scale [kv_heads] of each head's KV head, in the data
    type of x.
    """
    return (x * scales.repeat_interleave(x.shape[1] // len(scales)).unsqueeze(1)).to(x.dtype)


def expand_latent_scales(scales: torch.Tensor, rank: int, rope_dim: int) -> torch.Tensor:
    """Expands the two scales in `KVScales.k` to one for each element, [rank + rope_dim]. The first
    scale is for a latent's elements, the second for its `rope_dim` rotary elements.
    """
    return torch.cat((scales[:1].expand(rank), scales[1:].expand(rope_dim)))


def apply_latent_scales(x: torch.Tensor, scales: torch.Tensor, rank: int) -> torch.Tensor:
    """Multiplies x […, rank + rotary size] by the two scales in `KVScales.k`: the latent by the
    first, its rotary part by the second. The result has the data type of x.
    """
    return (x * expand_latent_scales(scales, rank, x.shape[-1] - rank)).to(x.dtype)


def gather_slots(cache: torch.Tensor, at: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the keys or values in token slots `at`, converted to `dtype`."""
    if cache.dtype == dtype:
        return cache.index_select(1, at)
    return view_as_indexable(cache).index_select(1, at).view(cache.dtype).to(dtype)


def view_as_indexable(x: torch.Tensor) -> torch.Tensor:
    """Returns a view of the tensor in a data type for which torch supports indexing by a tensor.
    Views 8-bit formats as uint8.
    """
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
