"""GPU memory of the ranks, shared between their processes by CUDA (IPC). All ranks read and write
all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from sglang_lite.runtime.kernels.all_reduce import Peers, rank_memory_shape
from sglang_lite.runtime.kernels.driver import call_driver
from sglang_lite.runtime.kernels.two_shot import PartPeers, memory_bytes

_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):  # CUipcMemHandle
    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class _Allocation:
    """Memory of the current GPU, allocated directly by the driver. Torch's allocations don't serve
    here, as they are parts of larger blocks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        address = ctypes.c_uint64()
        call_driver("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.address = address.value

    @property
    def handle(self) -> bytes:
        handle = _Handle()
        call_driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return bytes(handle)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:  # the fields of the protocol
        return {
            "shape": (self._size,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
        }

    def __del__(self) -> None:  # when no tensor is left
        with contextlib.suppress(Exception):  # the process may be ending
            call_driver("cuMemFree_v2", ctypes.c_uint64(self.address))


Swap = Callable[[bytes], Sequence[bytes]]  # sends bytes to all ranks, and returns the bytes of each


def share_memory(
    rank: int, count: int, row_bytes: int, device: torch.device, swap: Swap
) -> tuple[Peers, PartPeers]:
    """Allocates this rank's memory and opens that of the other ranks. All of it stays allocated
    until the processes end.

    Args:
        rank, count: this rank's number, and the number of ranks.
        row_bytes: bytes of the longest row that a program exchanges.
        device: this rank's GPU, which has access to the others'.
        swap: function that sends bytes to all ranks, and returns the bytes of each.

    Returns:
        Memory for exchanges of few numbers, and for sums of many.
    """
    shape = rank_memory_shape(count, row_bytes)
    with torch.cuda.device(device):
        torch.zeros(1, device=device)  # makes the context
        addresses, memory = _allocate_shared(rank, 8 * math.prod(shape), device, swap)
        peers = Peers.for_rank(rank, addresses, memory.view(torch.int64).view(shape))
        addresses, memory = _allocate_shared(rank, memory_bytes(count), device, swap)
        return peers, PartPeers.for_rank(rank, addresses, memory)


def _allocate_shared(
    rank: int, size: int, device: torch.device, swap: Swap
) -> tuple[list[int], torch.Tensor]:
    """Allocates `size` zeroed bytes on each rank. Returns the addresses of all ranks' memory, and
    this rank's as a tensor.
    """
    own = _Allocation(size)
    memory = torch.as_tensor(own, device=device).zero_()
    torch.cuda.synchronize(device)  # others may write from now on
    return [
        own.address if i == rank else _open_handle(handle)
        for i, handle in enumerate(swap(own.handle))
    ], memory


def _open_handle(handle: bytes) -> int:
    """Opens memory that another process has allocated, and returns its address."""
    address = ctypes.c_uint64()
    call_driver(
        "cuIpcOpenMemHandle_v2",
        ctypes.byref(address),
        _Handle.from_buffer_copy(handle),
        ctypes.c_uint(_ENABLE_PEER_ACCESS),
    )
    return address.value
