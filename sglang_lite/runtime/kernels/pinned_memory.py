"""Pinned host memory in one piece of exactly the required size."""

from __future__ import annotations

import contextlib
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

_PIECE = 1 << 28  # bytes that a thread touches at a time


def pin_memory(size: int) -> torch.Tensor:
    """Allocates pinned memory, uint8 [size], for which `unpin_memory` must be called before it is
    freed.

    Torch's own allocator rounds up to the next power of two and takes a second per GB, because it
    touches small pages on a single thread.

    Raises:
        RuntimeError: this much memory can't be pinned.
        OSError: the system has too little memory.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # of a kernel without large pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)  # a copy on write would take pages from under the device
    pinned = torch.frombuffer(memory, dtype=torch.uint8)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        list(threads.map(lambda at: pinned[at : at + _PIECE].zero_(), range(0, size, _PIECE)))
    cuda: Any = torch.cuda  # which leaves its types out
    cuda.check_error(cuda.cudart().cudaHostRegister(pinned.data_ptr(), size, 0))
    return pinned


def unpin_memory(pointer: int) -> None:
    """Waits for the device to finish its copies, then unpins the memory at an address."""
    cuda: Any = torch.cuda
    cuda.synchronize()
    cuda.check_error(cuda.cudart().cudaHostUnregister(pointer))
