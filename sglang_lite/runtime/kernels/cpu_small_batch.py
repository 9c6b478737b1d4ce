"""CPU operators for few tokens, each a single call of `cpu_small_batch.cpp`. The references are
torch's operators in `Decoder`.

A call of a torch operator takes some microseconds, and a layer has twenty such calls. In total,
they take as long as the matmuls of a small model.

Tensors are [T, …], contiguous and in the data type of activations, unless noted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # ctypes has no type for argument types

import torch

from sglang_lite.runtime.kernels.attention_metadata import AttentionPlan

_POINTER = ctypes.c_void_p
_INT = ctypes.c_int
_LONG = ctypes.c_int64
_FLOAT = ctypes.c_float
SOURCE = Path(__file__).with_suffix(".cpp")
FORMATS = {
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
}  # data types of activations, and of keys and values


ATTENTION: list[Any] = [  # argument types of `attend`
    _POINTER, _LONG, _POINTER, _POINTER, _LONG, *[_POINTER] * 3, *[_INT] * 6, _FLOAT, _POINTER,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReadSlots:
    """Token slots that each token of a step reads.

    Attributes:
        addresses: int64 [T], address of the token's slots as int32; 0 if they are contiguous and in
            order.
        firsts: int64 [T], the first slot if the address is 0.
        lengths: int32 [T], number of slots.
        longest: maximum of the lengths.
        slots: tensors that the addresses point into, kept alive here.
    """

    addresses: torch.Tensor
    firsts: torch.Tensor
    lengths: torch.Tensor
    longest: int
    slots: tuple[torch.Tensor, ...]

    @classmethod
    def from_plan(cls, plan: AttentionPlan) -> ReadSlots:
        """Collects the slots that each token of a plan reads. The plan must not have rows that
        share a prefix.
        """
        count = len(plan.store_at)
        addresses = [0] * count
        firsts = [0] * count
        lengths = [0] * count
        tensors = []
        for row in plan.extends:
            if isinstance(row.read_at, slice):
                address = 0
                first = row.read_at.start
            else:
                tensors.append(row.read_at.int().contiguous())
                address = tensors[-1].data_ptr()
                first = 0
            for token in range(row.start, row.end):
                addresses[token] = address
                firsts[token] = first
                lengths[token] = row.length - (row.end - token - 1)
        for group in plan.decode:
            slots = group.rows.read_at.int().contiguous()
            tensors.append(slots)
            tokens = group.tokens
            places = range(count)[tokens] if isinstance(tokens, slice) else tokens.tolist()
            for i, (token, length) in enumerate(
                zip(places, group.rows.lengths.tolist(), strict=True)
            ):
                addresses[token] = slots.data_ptr() + i * slots.stride(0) * slots.itemsize
                lengths[token] = length
        sizes = torch.tensor(lengths, dtype=torch.int32)
        return cls(
            torch.tensor(addresses), torch.tensor(firsts), sizes, max(lengths), tuple(tensors)
        )


class SmallBatchOps:
    """Operators for few tokens, compiled for one pair of data types.

    Args:
        library: compiled `cpu_small_batch.cpp`.
        activations, cache: data types, a pair in `FORMATS`.
    """

    def __init__(self, library: ctypes.CDLL, activations: torch.dtype, cache: torch.dtype) -> None:
        one = dtype_name(activations)
        both = f"{dtype_name(activations)}_{dtype_name(cache)}"
        self._add_norm = library[f"add_norm_{one}"]
        self._silu_mul = library[f"silu_mul_{one}"]
        self._rope_store = library[f"rope_store_{both}"]
        self._attend = library[f"attend_{both}"]
        self._add_norm.argtypes = [_POINTER] * 4 + [_INT, _INT, _FLOAT]
        self._silu_mul.argtypes = [_POINTER, _POINTER, _INT, _INT]
        self._rope_store.argtypes = [
            *[_POINTER] * 3, _FLOAT, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _LONG, _POINTER, *[_INT] * 4,
        ]  # fmt: skip
        self._attend.argtypes = ATTENTION

    def add_norm(
        self, x: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds `added` (if given) to x in place, and returns the RMS norm of the sum."""
        out = torch.empty_like(x)
        self._add_norm(
            x.data_ptr(), _address(added), weight.data_ptr(), out.data_ptr(), *x.shape, eps
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up [T, size] of gate_up [T, 2 size], gates first."""
        count = len(gate_up)
        size = gate_up.shape[1] // 2
        out = gate_up.new_empty((count, size))
        self._silu_mul(gate_up.data_ptr(), out.data_ptr(), count, size)
        return out

    def rope_store(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor | None, torch.Tensor | None],
        eps: float,
        rope: tuple[torch.Tensor, torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
        store_at: torch.Tensor,
    ) -> torch.Tensor:
        """Rotates queries and keys, and stores keys and values in token slots.

        Args:
            qkv: heads of queries, keys and values, in this order; overwritten.
            norms: weights of the norms of each head's query and key before the rotation, or None.
            eps: epsilon of the norms.
            rope: cos and sin of the positions.
            keys, values: cache of the layer [kv_heads, slots, head_dim], in the data type of the
                cache.
            store_at: int64 [T], token slot of each token.

        Returns:
            Queries [T, heads, head_dim], a view of `qkv`.
        """
        kv_heads, slots, size = keys.shape
        heads = qkv.shape[1] // size - 2 * kv_heads
        cos, sin = rope
        self._rope_store(
            qkv.data_ptr(),
            _address(norms[0]),
            _address(norms[1]),
            eps,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[-1],
            keys.data_ptr(),
            values.data_ptr(),
            slots,
            store_at.data_ptr(),
            len(qkv),
            heads,
            kv_heads,
            size,
        )
        return qkv.view(len(qkv), -1, size)[:, :heads]

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        reads: ReadSlots,
        window: int | None,
        scale: float,
    ) -> torch.Tensor:
        """Returns attention [T, heads, head_dim] of queries q, as `rope_store` returns them, over
        the slots that each token reads. With a window, a token reads only the last `window` of
        them.
        """
        return call_attention(self._attend, q, keys, values, reads, window, scale)


def call_attention(
    run: Callable[..., None],
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    reads: ReadSlots,
    window: int | None,
    scale: float,
    *threads: int,
) -> torch.Tensor:
    """Calls a C function that implements `attend`. The function has the parameters `ATTENTION`, and
    a number of threads if `threads` is given.
    """
    count, heads, size = q.shape
    kv_heads, slots, _ = keys.shape
    out = q.new_empty((count, heads, size))
    run(
        q.data_ptr(),
        q.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        slots,
        reads.addresses.data_ptr(),
        reads.firsts.data_ptr(),
        reads.lengths.data_ptr(),
        reads.longest,
        window or 0,
        count,
        heads,
        kv_heads,
        size,
        scale,
        out.data_ptr(),
        *threads,
    )
    return out


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name of a data type as it occurs in the libraries' function names."""
    return str(dtype).removeprefix("torch.")


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
