"""Exchanges between processes of one machine through shared memory, implemented in
`shared_sums.cpp`. Each takes a copy, a counter and a short wait. A socket would take several system
calls and a process switch.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import torch

_LINE = 64  # bytes of a rank's counter
SLOT = 1 << 22  # most bytes that a rank sends in one exchange; untouched pages take no memory
SOURCE = Path(__file__).with_suffix(".cpp")
_NAMES = {torch.float32: "sum_float32", torch.bfloat16: "sum_bfloat16"}


def memory_size(ranks: int) -> int:
    """Returns how many bytes of shared memory the ranks need. All must be zero at first."""
    return ranks * (_LINE + 2 * SLOT)


class SharedSums:
    """Sums and gathers over the ranks of one machine. All ranks must call the same methods in the
    same order.

    Args:
        library: compiled `shared_sums.cpp`.
        memory: memory of `memory_size(count)` bytes that all ranks share.
        rank, count: this rank's number, and the number of ranks.
        timeout_s: time after which an exchange fails if not all ranks have begun it.
    """

    def __init__(
        self, library: ctypes.CDLL, memory: mmap.mmap, rank: int, count: int, timeout_s: float
    ) -> None:
        pointer = ctypes.c_void_p
        number = ctypes.c_long
        self._exchange = library["exchange"]
        self._sums = {dtype: library[name] for dtype, name in _NAMES.items()}
        self._exchange.argtypes = [
            pointer,
            ctypes.c_int,
            number,
            ctypes.c_int,
            ctypes.c_uint32,
            pointer,
            number,
            ctypes.c_double,
        ]
        for function in self._sums.values():
            function.argtypes = [pointer, ctypes.c_int, number, ctypes.c_uint32, number, pointer]
            function.restype = None
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        self._address = self._memory.data_ptr()
        self._rank = rank
        self._count = count
        self._timeout_s = timeout_s
        self._epoch = 0

    def can_sum(self, x: torch.Tensor) -> bool:
        """Returns whether tensors of x's data type can be summed."""
        return x.dtype in self._sums

    def sum_(self, x: torch.Tensor) -> None:
        """Replaces x, contiguous and at most SLOT bytes, with the sum of all ranks' x."""
        self._send(x)
        epoch = self._epoch & 0xFFFFFFFF
        add = self._sums[x.dtype]
        add(self._address, self._count, SLOT, epoch, x.numel(), x.data_ptr())

    def gather_from_ranks(
        self, x: torch.Tensor, shapes: list[tuple[int, ...]]
    ) -> list[torch.Tensor]:
        """Returns all ranks' x, as views that stay valid until the exchange after the next one.

        Args:
            x: contiguous, and at most SLOT bytes.
            shapes: shape of each rank's x.
        """
        self._send(x)
        half = self._count * _LINE + (self._epoch & 1) * self._count * SLOT
        slots = self._memory[half : half + self._count * SLOT].view(self._count, SLOT)
        sizes = [torch.Size(shape).numel() for shape in shapes]
        return [
            slot.view(x.dtype)[:size].view(shape)
            for slot, size, shape in zip(slots, sizes, shapes, strict=True)
        ]

    def _send(self, x: torch.Tensor) -> None:
        self._epoch += 1
        late: int = self._exchange(
            self._address,
            self._count,
            SLOT,
            self._rank,
            self._epoch & 0xFFFFFFFF,
            x.data_ptr(),
            x.nbytes,
            self._timeout_s,
        )
        if late >= 0:
            raise RuntimeError(
                f"rank {late} of {self._count} has not come within {self._timeout_s:g} s"
            )
