"""Fused versions of parts of Qwen's image encoders, which move less data through memory. With
transformers' own versions, an image of 4,000 patches spends more time in norms, rotations and
copies than in matmuls.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Generic, TypeAlias, TypeVar

import torch
import torch.nn.functional as F

_R = TypeVar("_R")
_Rotate: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]  # queries and keys, by cosines and sines
_Gated: TypeAlias = Callable[[torch.Tensor, str], torch.Tensor]
# Attention [T, heads, dim] of queries, keys and values [T, heads, dim] within windows: window i has
# the patches from borders[i] to borders[i + 1], int32 [windows + 1].
_Attend: TypeAlias = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]
_ALIGNED = 8  # elements: matrix products are several times faster if rows are multiples of 16 bytes


def fuse_encoder(
    encoder: Any, dtype: torch.dtype, device: torch.device
) -> None:  # transformers' module
    """Replaces parts of an encoder with faster ones. Parameters keep their names; some become views
    of larger tensors.

    Args:
        encoder: transformers' module, with its weights.
        dtype, device: data type and device of the weights and the computation.
    """
    attend: _Attend = partial(_attend_by_size, _OfBorders(_window_indices))
    if device.type == "cuda":
        from sglang_lite.runtime.kernels.activation import (
            apply_gated,
        )  # imports Triton, as does the next
        from sglang_lite.runtime.kernels.rotate import rotate

        if dtype.itemsize == 2 and encoder.blocks[0].attn.head_dim % _ALIGNED == 0:
            attend = partial(_attend_flash, _OfBorders(_longest_window))
    else:
        from sglang_lite.runtime.kernels.reference.activation import apply_gated
        from sglang_lite.runtime.kernels.reference.rotate import rotate

    encoder.patch_embed.forward = partial(_embed_patches, encoder.patch_embed.proj)
    for block in encoder.blocks:
        block.attn = _WindowAttention(block.attn, attend, rotate)
        if hasattr(block.mlp, "gate_proj") and encoder.config.hidden_act == "silu":
            block.mlp = _GatedLayer(block.mlp, apply_gated)
        for name in ("norm1", "norm2"):
            norm = getattr(block, name)
            # an RMS norm, which transformers computes in steps
            if hasattr(norm, "variance_epsilon"):
                fused = torch.nn.RMSNorm(norm.weight.shape[0], norm.variance_epsilon, device="meta")
                fused.weight = norm.weight
                setattr(block, name, fused)


def _embed_patches(convolution: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Embeds the pixels [T, n] of patches as [T, hidden size]. Uses a matmul, since the convolution
    has a single position per patch.
    """
    return F.linear(pixels, convolution.weight.flatten(1), convolution.bias)


class _OfBorders(Generic[_R]):
    """Caches the last two results of a function of window borders, since each new result waits for
    the GPU. All layers of a pass share one or two tensors of borders.
    """

    def __init__(self, find: Callable[[torch.Tensor], _R]) -> None:
        self._find = find
        self._found: list[tuple[torch.Tensor, _R]] = []

    def __call__(self, borders: torch.Tensor) -> _R:
        for known, found in self._found:
            if known is borders:
                return found
        found = self._find(borders)
        self._found = [*self._found[-1:], (borders, found)]
        return found


def _longest_window(borders: torch.Tensor) -> int:
    """Returns the length of the longest window."""
    return int(borders.diff().max())


def _window_indices(borders: torch.Tensor) -> list[torch.Tensor]:
    """Groups the windows by length. Returns the patch indices [windows, length] of each group."""
    starts: dict[int, list[int]] = {}
    for start, end in pairwise(borders.tolist()):
        starts.setdefault(end - start, []).append(start)
    return [
        torch.tensor(those, device=borders.device).unsqueeze(1)
        + torch.arange(length, device=borders.device)
        for length, those in starts.items()
    ]


def _attend_flash(
    longest: Callable[[torch.Tensor], int],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    borders: torch.Tensor,
) -> torch.Tensor:
    """Returns attention outputs [T, heads, dim] within windows, with one kernel for windows of all
    lengths.
    """
    from torch.nn.attention.varlen import varlen_attn

    most = longest(borders)
    found = varlen_attn(q, k, v, borders, borders, most, most)
    assert isinstance(found, torch.Tensor), "nothing else was asked for"
    return found


def _attend_by_size(
    windows: Callable[[torch.Tensor], list[torch.Tensor]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    borders: torch.Tensor,
) -> torch.Tensor:
    """Returns attention outputs [T, heads, dim] within windows. Computes all windows of the same
    length together.
    """
    out = torch.empty_like(v)
    for at in windows(borders):
        own_q, own_k, own_v = (each[at].transpose(1, 2) for each in (q, k, v))
        out[at] = F.scaled_dot_product_attention(own_q, own_k, own_v).transpose(1, 2)
    return out


class _WindowAttention(torch.nn.Module):
    """Attention within windows or whole images.

    Transformers' module computes one window at a time, of which a large image has hundreds,
    and waits for the GPU in each layer.

    Args:
        attention: transformers' module.
        attend: attention of queries.
        rotate: `kernels.rotate.rotate`, or its reference version.
    """

    def __init__(self, attention: torch.nn.Module, attend: _Attend, rotate: _Rotate) -> None:
        super().__init__()
        self._of: Any = attention
        self._attend = attend
        self._rotate = rotate

    def forward(
        self,
        hidden_states: torch.Tensor,
        cu_seqlens: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **_: object,
    ) -> torch.Tensor:
        """Returns outputs [T, hidden size] for patches [T, hidden size]. `cu_seqlens` holds the
        borders of the windows.
        """
        q, k, v = (
            self._of.qkv(hidden_states)
            .view(len(hidden_states), 3, self._of.num_heads, -1)
            .unbind(1)
        )
        cos, sin = (each.contiguous().unsqueeze(0) for each in position_embeddings)
        rotated = self._rotate(
            q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), cos, sin
        )
        q, k = (each.squeeze(0).transpose(0, 1) for each in rotated)
        return self._of.proj(self._attend(q, k, v, cu_seqlens).flatten(1))  # type: ignore[no-any-return] # of transformers


class _GatedLayer(torch.nn.Module):
    """Feed-forward layer down(silu(gate(x)) * up(x)), with gate and up in one matmul. Its width is
    padded with zeros so that rows are multiples of 16 bytes.

    Args:
        layer: transformers' module.
        gated: `kernels.activation.apply_gated`, or its reference version.
    """

    def __init__(self, layer: Any, gated: _Gated) -> None:
        super().__init__()
        self._of = layer
        self._gated = gated
        size = layer.gate_proj.weight.shape[0]
        self._rows = -(-size // _ALIGNED) * _ALIGNED
        for name in ("weight", "bias"):
            parts = [getattr(each, name) for each in (layer.gate_proj, layer.up_proj)]
            both = parts[0].data.new_zeros((2, self._rows, *parts[0].shape[1:]))
            for part, whole in zip(parts, both):
                part.data = whole[:size].copy_(part.data)
        down = layer.down_proj.weight
        down.data = F.pad(down.data, (0, self._rows - size))[:, :size]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self._of.gate_proj
        down = self._of.down_proj
        both = F.linear(x, self._view_gate_and_up(gate.weight), self._view_gate_and_up(gate.bias))
        padded = down.weight.as_strided((len(down.weight), self._rows), (self._rows, 1))
        return F.linear(self._gated(both, "silu"), padded, down.bias)

    def _view_gate_and_up(self, gate: torch.Tensor) -> torch.Tensor:
        """Returns a tensor that starts with the gate's values, followed by those of the up
        projection. It is created as a view on every call, since the weights may be rewritten or
        moved.
        """
        return gate.as_strided((2 * self._rows, *gate.shape[1:]), gate.stride())
