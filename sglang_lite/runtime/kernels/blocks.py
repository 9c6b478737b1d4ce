"""Copies between pages of the KV cache and blocks of pinned host memory. All planes of the same
shape and type are copied in one launch.

A block holds all planes of a page, one after the other, head by head. In a plane, the tokens of a
page are contiguous for each head. So a program copies `CHUNK` words, contiguous on both sides, and
moves on to the next. A few programs keep the bus busy and leave the other multiprocessors to the
steps that run meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.sizes import round_up_to_power_of_2

# Enough bytes in flight for a bus of 64 GB/s. Stores don't wait for it, so they need fewer
# multiprocessors.
PROGRAMS = 64
PROGRAMS_TO_HOST = 16


@cached_launch
@triton.jit
def _copy(
    pointers,
    memory,
    pages,
    slots,
    items,
    planes,
    head_stride,
    block_stride,
    first,
    HEADS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TO_HOST: tl.constexpr,
):
    words = tl.arange(0, BLOCK)
    exists = words < CHUNK
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        chunk = item % (planes * HEADS)
        at = item // (planes * HEADS)
        plane = tl.load(pointers + chunk // HEADS).to(memory.dtype)
        page = tl.load(pages + at).to(tl.int64)
        slot = tl.load(slots + at).to(tl.int64)
        device = plane + (chunk % HEADS).to(tl.int64) * head_stride + page * CHUNK + words
        host = memory + slot * block_stride + first + chunk * CHUNK + words
        if TO_HOST:
            tl.store(host, tl.load(device, mask=exists), mask=exists)
        else:
            tl.store(device, tl.load(host, mask=exists), mask=exists)


class BlockCopy:
    """Function that copies pages of one cache to blocks of pinned memory, and back.

    Args:
        planes: keys and values, and what is recorded beside them, each [heads, slots, size].
        memory: uint8 [blocks * bytes of a page], pinned.
        page_size: tokens in a page.
    """

    def __init__(
        self, planes: Sequence[torch.Tensor], memory: torch.Tensor, page_size: int
    ) -> None:
        alike: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        for plane in planes:
            if plane.shape[2]:  # layers without attention have none
                alike.setdefault((plane.shape, plane.dtype), []).append(plane)
        chunks = [page_size * shape[2] * kind.itemsize for shape, kind in alike]
        word = next(
            kind
            for kind in (torch.int64, torch.int32, torch.int16, torch.int8)
            if all(chunk % kind.itemsize == 0 for chunk in chunks or (1,))
        )
        self._memory = memory.view(word)
        self._groups = []
        self._block = 0
        first = 0
        for ((shape, kind), group), chunk in zip(alike.items(), chunks):
            pointers = torch.tensor(
                [p.data_ptr() for p in group], dtype=torch.int64, device=planes[0].device
            )
            size = chunk // word.itemsize
            stride = shape[1] * shape[2] * kind.itemsize // word.itemsize
            self._groups.append((pointers, shape[0], size, stride, first))
            first += len(group) * shape[0] * size
        self._block = first

    def __call__(self, pages: torch.Tensor, slots: torch.Tensor, *, to_host: bool) -> None:
        """Copies pages, int32 [N], to the blocks numbered `slots`, int32 [N], or in the opposite
        direction. Moves N pages over the bus.
        """
        for pointers, heads, size, stride, first in self._groups:
            items = len(pages) * len(pointers) * heads
            _copy[(min(items, PROGRAMS_TO_HOST if to_host else PROGRAMS),)](
                pointers,
                self._memory,
                pages,
                slots,
                items,
                len(pointers),
                stride,
                self._block,
                first,
                HEADS=heads,
                CHUNK=size,
                BLOCK=round_up_to_power_of_2(size),
                TO_HOST=to_host,
                num_warps=4,
            )
