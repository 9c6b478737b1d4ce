"""Small operators of one row on a CPU, each a call of `one_row.cpp`. Torch's take some microseconds each to be called,
twenty of them a layer: together as long as a small model's products. Their twins are torch's operators in `Decoder`.

A tensor is [1, …] and contiguous, in the format of activations, unless it is said otherwise.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from sglang_lite.runtime.kernels.attention_metadata import ExtendRow

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
SOURCE = Path(__file__).with_suffix(".cpp")
FORMATS = {
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
}  # of activations, and of keys and values


class OneRow:
    """
    Args:
        library: of `one_row.cpp`.
        activations, cache: formats, of `FORMATS`.
    """

    def __init__(self, library: ctypes.CDLL, activations: torch.dtype, cache: torch.dtype) -> None:
        one, both = _name(activations), f"{_name(activations)}_{_name(cache)}"
        self._add_norm, self._silu_mul = library[f"add_norm_{one}"], library[f"silu_mul_{one}"]
        self._turn_store, self._attend = library[f"turn_store_{both}"], library[f"attend_{both}"]
        self._add_norm.argtypes = [_POINTER] * 4 + [_INT, _FLOAT]
        self._silu_mul.argtypes = [_POINTER, _POINTER, _INT]
        self._turn_store.argtypes = [
            *[_POINTER] * 3, _FLOAT, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _LONG, _LONG, _INT, _INT, _INT,
        ]  # fmt: skip
        self._attend.argtypes = [
            *[_POINTER] * 3, _LONG, _POINTER, _LONG, _INT, _INT, _INT, _INT, _FLOAT, *[_POINTER] * 3,
        ]  # fmt: skip

    def add_norm(self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Adds `added` to x, in place, and returns its RMS norm."""
        out = torch.empty_like(x)
        self._add_norm(x.data_ptr(), _address(added), weight.data_ptr(), out.data_ptr(), x.shape[1], eps)
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up [1, size] of [1, 2 size], gate first."""
        size = gate_up.shape[1] // 2
        out = gate_up.new_empty((1, size))
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), size)
        return out

    def turn_store(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
        eps: float,
        rope: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        at: int,
    ) -> torch.Tensor:
        """Turns queries and keys, and writes keys and values to a token slot.

        Args:
            qkv: heads of queries, of keys, and of values; overwritten.
            norms: weights of the norms of each head's query and key before they turn.
            rope: cos and sin of the position.
            keys, values: of the layer [kv_heads, slots, head_dim], in the format of the cache.
            at: the token slot.

        Returns:
            Queries [1, heads, head_dim]: the beginning of `qkv`.
        """
        kv_heads, slots, size = keys.shape
        heads = qkv.shape[1] // size - 2 * kv_heads
        cos, sin = rope
        self._turn_store(
            qkv.data_ptr(), _address(norms[0]), _address(norms[1]), eps, cos.data_ptr(), sin.data_ptr(), cos.shape[-1],
            keys.data_ptr(), values.data_ptr(), slots, at, heads, kv_heads, size,
        )  # fmt: skip
        return qkv[:, : heads * size].view(1, heads, size)

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, row: ExtendRow, first: int, scale: float
    ) -> torch.Tensor:
        """Attention [1, heads, head_dim] of queries q over positions `first` … of the row, as `turn_store` has them."""
        _, heads, size = q.shape
        kv_heads, slots, _ = keys.shape
        length, group = row.length - first, heads // kv_heads
        out = torch.empty_like(q)
        room = torch.empty(group * (length + size))  # for scores, and for sums
        if isinstance(row.read_at, slice):
            read_at, start = None, row.read_at.start + first
        else:
            read_at, start = row.read_at[first:].int(), 0
        self._attend(
            q.data_ptr(), keys.data_ptr(), values.data_ptr(), slots, _address(read_at), start,
            length, heads, kv_heads, size, scale, room.data_ptr(), room.data_ptr() + group * length * room.itemsize,
            out.data_ptr(),
        )  # fmt: skip
        return out


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
