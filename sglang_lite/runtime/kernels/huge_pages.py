"""Host memory in pages of 2 MiB, for weights that each step reads from one end to the other.

The processor's prefetchers stop at the end of a page, and each page of 4 KiB needs an entry of its
own in the translation tables. On virtual machines a lookup there takes two walks, so a long read
from huge pages is 10 to 20 % faster. Only Linux has them; elsewhere, and on systems without any,
ordinary pages are used.
"""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
import torch

_HUGE = 2 << 20


def allocate_huge_page_tensor(size: int) -> torch.Tensor:
    """Returns an uninitialised uint8 [size] tensor, in as many huge pages as it fills completely.

    The rest is in ordinary pages, so that the tensor takes no more memory than its size.
    """
    if size < _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = np.frombuffer(memory, np.uint8)
    start = -data.ctypes.data % _HUGE
    with contextlib.suppress(OSError):  # of a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, start, size // _HUGE * _HUGE)
    return torch.from_numpy(data[start : start + size])
