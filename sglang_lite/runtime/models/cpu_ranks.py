"""Collectives for ranks on the CPUs of one machine, through shared memory."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import torch

from sglang_lite.runtime.host.cache_folder import cache_folder
from sglang_lite.runtime.host.cpu_library import load_cpu_library
from sglang_lite.runtime.kernels.shared_sums import SLOT, SOURCE, SharedSums, memory_size
from sglang_lite.runtime.parallel.collectives import Collectives, exchange_bytes, rows_of_rank

_TIMEOUT_S = 300.0


class CpuRanks:
    """Collectives through shared memory. Larger tensors are exchanged in pieces.

    Args:
        host: collectives for dtypes that shared memory does not sum.
        shared: exchanges through shared memory.
        in_stage: collectives of this stage's ranks, if there are several stages.
    """

    def __init__(self, host: Collectives, shared: SharedSums, in_stage: Collectives | None) -> None:
        self.parallel = host.parallel
        self._host = host
        self._shared = shared
        self.in_stage: Collectives = in_stage or self

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        if not self._shared.can_sum(x):
            return self._host.sum(x)
        x = x.contiguous()
        for piece in torch.split(x.view(-1), SLOT // x.itemsize):
            self._shared.sum_(piece)
        return x

    def sum_and_scatter_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return rows_of_rank(self.sum(x), counts, self.parallel.rank)

    def gather_columns(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        rows = SLOT // (max(sizes) * x.itemsize)
        if not rows:
            return self._host.gather_columns(x, sizes)
        out = x.new_empty((len(x), sum(sizes)))
        for own, whole in zip(torch.split(x, rows), torch.split(out, rows), strict=True):
            parts = self._shared.gather_from_ranks(
                own.contiguous(), [(len(own), size) for size in sizes]
            )
            torch.cat(parts, 1, out=whole)
        return out


def connect(host: Collectives) -> Collectives:
    """Connects the ranks of one machine through shared memory; all of them must call this. Returns
    `host` if there is only one rank, more than one machine, or no compiler.
    """
    parallel = host.parallel
    if parallel.nodes > 1 or parallel.ranks == 1:
        return host
    library = (
        load_cpu_library(SOURCE, cache_folder() / "compiled")
        if hasattr(os, "memfd_create")
        else None
    )
    if not all(map(any, exchange_bytes(host, bytes([library is not None])))):
        return host
    assert library is not None
    size = memory_size(parallel.ranks)
    own = os.memfd_create("sglang_lite-sums") if parallel.rank == 0 else None
    if own is not None:
        os.ftruncate(own, size)
    path = exchange_bytes(host, b"" if own is None else f"/proc/{os.getpid()}/fd/{own}".encode())[0]
    descriptor = os.open(path, os.O_RDWR)
    memory = mmap.mmap(descriptor, size)
    os.close(descriptor)
    exchange_bytes(host, b"")  # all have opened it
    if own is not None:
        os.close(own)
    shared = SharedSums(library, memory, parallel.rank, parallel.ranks, _TIMEOUT_S)
    return CpuRanks(host, shared, None if parallel.pp == 1 else connect(host.in_stage))
