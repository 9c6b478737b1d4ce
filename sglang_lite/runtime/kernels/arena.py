"""Memory that can be released and restored while its tensors continue to exist. On a GPU, the
tensors' addresses stay reserved, since captured graphs contain them. On a CPU, memory maps are
used.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from mmap import MADV_DONTNEED, MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any, Protocol

import numpy as np
import torch

from sglang_lite.runtime.kernels.driver import call_driver

# CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ALLOCATION_TYPE_PINNED, …PROT_READWRITE
_DEVICE = 1
_PINNED = 1
_READ_WRITE = 3


class Arena(Protocol):
    """Allocator of tensors whose memory can be released and restored together."""

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a tensor of zeros in newly allocated memory."""
        ...

    def release_memory(self) -> None:
        """Releases the memory. The tensors must not be used until it is restored."""
        ...

    def restore_memory(self) -> None:
        """Allocates the memory again. The tensors' values are undefined on a GPU, and zeros on a
        CPU.
        """
        ...


class HostArena:
    """Arena of CPU memory, whose pages are mapped when they are first touched."""

    def __init__(self) -> None:
        self._maps: list[mmap] = []

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = mmap(-1, max(math.prod(shape) * dtype.itemsize, 1), MAP_PRIVATE | MAP_ANONYMOUS)
        self._maps.append(made)
        data = np.frombuffer(made, dtype=np.uint8)[: math.prod(shape) * dtype.itemsize]
        return torch.from_numpy(data).view(dtype).view(*shape)

    def release_memory(self) -> None:
        for each in self._maps:
            each.madvise(MADV_DONTNEED)

    def restore_memory(self) -> None:
        """Does nothing: pages come back when they are touched."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):  # CUmemAllocationProp
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):  # CUmemAccessDesc
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@dataclass(slots=True)
class _Region:
    """Range of addresses, and the memory mapped to it.

    Attributes:
        address, size: first address, and bytes.
        handle: driver's handle of its memory; None while it has none.
    """

    address: int
    size: int
    handle: int | None

    def __del__(self) -> None:  # when neither its arena nor any tensor refers to it
        with contextlib.suppress(Exception):  # the process may be ending
            torch.cuda.synchronize()
            self.unmap()
            call_driver(
                "cuMemAddressFree", ctypes.c_uint64(self.address), ctypes.c_size_t(self.size)
            )

    def unmap(self) -> None:
        """Releases the memory, but keeps the addresses reserved."""
        if self.handle is not None:
            call_driver("cuMemUnmap", ctypes.c_uint64(self.address), ctypes.c_size_t(self.size))
            call_driver("cuMemRelease", ctypes.c_uint64(self.handle))
            self.handle = None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:  # the fields of the protocol
        return {
            "shape": (self.size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }


class DeviceArena:
    """Arena of GPU memory at addresses that are reserved once.

    Args:
        device: the GPU.

    Raises:
        torch.OutOfMemoryError: the GPU has too little memory. Also raised by `zeros` and
            `restore_memory`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.cuda.current_stream(device)  # makes the context
        torch.zeros(1, device=device)
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._properties = _Properties(type=_PINNED, location=_Location(_DEVICE, self._index))
        size = ctypes.c_size_t()
        call_driver(
            "cuMemGetAllocationGranularity",
            ctypes.byref(size),
            ctypes.byref(self._properties),
            ctypes.c_int(0),
        )
        self._granularity = size.value
        self._regions: list[_Region] = []

    def allocate_bytes(self, size: int) -> torch.Tensor:
        """Allocates `size` bytes with undefined values."""
        if not size:  # of layers that keep nothing by token
            return torch.empty(0, dtype=torch.uint8, device=self._device)
        whole = -(-size // self._granularity) * self._granularity
        address = ctypes.c_uint64()
        call_driver(
            "cuMemAddressReserve",
            ctypes.byref(address),
            ctypes.c_size_t(whole),
            ctypes.c_size_t(0),
            ctypes.c_uint64(0),
            ctypes.c_uint64(0),
        )
        region = _Region(address.value, whole, None)
        self._map(region)
        self._regions.append(region)
        return torch.as_tensor(region, device=self._device)[:size]

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return (
            self.allocate_bytes(math.prod(shape) * dtype.itemsize).zero_().view(dtype).view(*shape)
        )

    def release_memory(self) -> None:
        torch.cuda.synchronize(self._device)
        for region in self._regions:
            region.unmap()

    def restore_memory(self) -> None:
        for region in self._regions:
            if region.handle is None:
                self._map(region)

    def _map(self, region: _Region) -> None:
        handle = ctypes.c_uint64()
        size = ctypes.c_size_t(region.size)
        call_driver(
            "cuMemCreate",
            ctypes.byref(handle),
            size,
            ctypes.byref(self._properties),
            ctypes.c_uint64(0),
        )
        at = ctypes.c_uint64(region.address)
        call_driver("cuMemMap", at, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        access = _Access(_Location(_DEVICE, self._index), _READ_WRITE)
        call_driver("cuMemSetAccess", at, size, ctypes.byref(access), ctypes.c_size_t(1))
        region.handle = handle.value
