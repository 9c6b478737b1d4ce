"""Descriptors of tensors whose tiles are copied in bulk (TMA), cached by memory address."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor


@dataclass(frozen=True, slots=True)
class _TensorAddress:
    """Stand-in for a tensor in its descriptor, so that the descriptor does not keep the tensor's
    memory alive. Another tensor of the same shape and data type at the same address has the same
    descriptor.
    """

    address: int
    dtype: torch.dtype
    device: torch.device

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return -1 if self.device.index is None else self.device.index


def tensor_descriptor(
    x: torch.Tensor, columns: int, block: tuple[int, int], layout: Any = None
) -> Any:  # descriptor of Triton
    """Returns the descriptor of a contiguous tensor, viewed as rows of `columns` elements.

    Args:
        x: tensor to describe.
        columns: elements of a row.
        block: rows and columns that are copied together.
        layout: layout of a block in shared memory, for Gluon kernels; None for Triton kernels.
    """
    rows = x.numel() // columns
    if triton.knobs.runtime.interpret:
        return TensorDescriptor(x, [rows, columns], [columns, 1], list(block))
    return _cached_descriptor(x.data_ptr(), x.dtype, x.device, rows, columns, block, layout)


@functools.lru_cache(maxsize=4096)
def _cached_descriptor(
    address: int,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    columns: int,
    block: tuple[int, int],
    layout: Any,
) -> Any:
    place = _TensorAddress(address, dtype, device)
    if layout is None:
        return TensorDescriptor(place, [rows, columns], [columns, 1], list(block))
    from triton.experimental.gluon.nvidia import hopper  # absent in Triton 3.5

    return hopper.TensorDescriptor(place, [rows, columns], [columns, 1], list(block), layout)
