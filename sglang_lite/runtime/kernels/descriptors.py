"""Descriptors of tensors whose tiles are copied in bulk (TMA), made once for each place in memory."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True, slots=True)
class _Place:
    """All that a descriptor says of a tensor's memory, which it does not keep alive: what comes to lie there with the
    same sizes has the same descriptor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def described(x: torch.Tensor, columns: int, block: tuple[int, int], layout: Any = None) -> Any:  # of Triton
    """Descriptor of a contiguous tensor as rows of so many columns.

    Args:
        block: rows and columns that are copied together.
        layout: of Gluon's kernels: how these lie in shared memory.
    """
    rows = x.numel() // columns
    if triton.knobs.runtime.interpret:
        return TensorDescriptor(x, [rows, columns], [columns, 1], list(block))
    return _described(x.data_ptr(), x.dtype, rows, columns, block, layout)


@functools.lru_cache(maxsize=4096)
def _described(address: int, dtype: torch.dtype, rows: int, columns: int, block: tuple[int, int], layout: Any) -> Any:
    place = _Place(address, dtype)
    if layout is None:
        return TensorDescriptor(place, [rows, columns], [columns, 1], list(block))
    from triton.experimental.gluon.nvidia import hopper  # Triton 3.5 has none

    return hopper.TensorDescriptor(place, [rows, columns], [columns, 1], list(block), layout)
