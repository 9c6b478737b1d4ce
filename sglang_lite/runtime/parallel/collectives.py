"""Collectives of an engine's ranks: sums, and tensors gathered in the ranks' order.

Each engine has groups of its own: torch's default group, of which a process has one, is never used.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch

from sglang_lite.protocol import BackendError
from sglang_lite.runtime.parallel.layout import ALONE, Parallel

_TCP = "tcp://"


class Collectives(Protocol):
    """Operations in which every rank takes part, with tensors of the same shape and dtype, in the same order.

    Attributes:
        parallel: layout of the ranks.
        in_stage: collectives of those that have the same layers as this one.
    """

    @property
    def parallel(self) -> Parallel: ...

    @property
    def in_stage(self) -> Collectives: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' tensors on every rank, perhaps in the memory of `x`."""
        ...

    def sum_own(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Returns this rank's rows of the sum of all ranks' tensors.

        Args:
            x: this rank's tensor, which has rows of all ranks.
            counts: number of each rank's rows.
        """
        ...

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Returns the ranks' columns side by side, on every rank.

        Args:
            x: this rank's columns [R, columns].
            sizes: number of each rank's columns.
        """
        ...


class OneProcess:
    """Collectives of a single rank: each returns its argument."""

    parallel = ALONE

    @property
    def in_stage(self) -> Collectives:
        return self

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def sum_own(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return x

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return x


ONE_PROCESS = OneProcess()


def torch_distributed() -> Any:  # whose types lack the names that are used here
    """Returns the module `torch.distributed`."""
    from torch import distributed  # slow to import

    return distributed


class _GlooGroup:
    """Collectives of the processes that have met at a store of torch, with options of gloo."""

    def __init__(self, parallel: Parallel, store: Any, options: Any) -> None:
        self.parallel = parallel
        self.in_stage: Collectives = self
        self._group = torch_distributed().ProcessGroupGloo(store, parallel.rank, parallel.ranks, options)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def sum_own(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return own_rows(self.sum(x), counts, self.parallel.rank)

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        most = max(sizes)
        padded = torch.nn.functional.pad(x, (0, most - x.shape[1]))
        parts = [torch.empty_like(padded) for _ in sizes]
        self._group.allgather([parts], [padded.contiguous()]).wait()
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes)], 1)


class GlooCollectives(_GlooGroup):
    """Collectives of processes on CPUs.

    Args:
        parallel: layout of the ranks, and the place of this one.
        meeting: path of a file in a folder that other users can't read, by which ranks of one machine find one another;
            "tcp://host:port", where rank 0 listens, for those of several.
        timeout_s: time after which an operation fails that not all ranks have begun.

    Raises:
        RuntimeError: not all ranks came within `timeout_s`; from a collective, if another rank has ended.
    """

    def __init__(self, parallel: Parallel, meeting: Path | str, timeout_s: float) -> None:
        group = torch_distributed().ProcessGroupGloo
        options = group._Options()  # noqa: SLF001  # torch has no other name for it
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001  # the same
        options._devices = [group.create_device(hostname=_own_address(str(meeting)))]  # noqa: SLF001  # the same
        store = open_store(str(meeting), parallel, timeout_s)
        super().__init__(parallel, store, options)
        if parallel.pp > 1:
            alone, own = parallel.tp == 1, parallel.in_stage
            self.in_stage = ONE_PROCESS if alone else _GlooGroup(own, store_of_stage(store, parallel), options)
        self.sum(torch.zeros(1))  # all have met: the file may go


def open_store(meeting: str, parallel: Parallel, timeout_s: float) -> Any:  # of torch
    """Store by which ranks find one another; arguments as for `GlooCollectives`.

    Raises:
        BackendError: the port is taken, or rank 0 can't be reached.
    """
    if not meeting.startswith(_TCP):
        return torch_distributed().FileStore(meeting, parallel.ranks)
    host, _, port = meeting.removeprefix(_TCP).rpartition(":")
    try:
        return torch_distributed().TCPStore(
            host, int(port), parallel.ranks, parallel.rank == 0, timedelta(seconds=timeout_s), wait_for_workers=False
        )
    except RuntimeError as error:
        what = "listen at" if parallel.rank == 0 else "reach rank 0 at"
        raise BackendError(
            f"dist_init_addr: rank {parallel.rank} can't {what} {host}:{port}: {str(error).partition(chr(10))[0]}.",
            hint="The two ports behind that of dist_init_addr must be free on machine 0, and let through.",
        ) from error


def store_of_stage(store: Any, parallel: Parallel) -> Any:  # of torch
    """Store by which the ranks of this one's stage find one another, in that of all ranks."""
    return torch_distributed().PrefixStore(f"stage {parallel.stage}", store)


def _own_address(meeting: str) -> str:
    """Address at which other ranks reach this one: of this machine alone, or that by which it reaches rank 0."""
    if not meeting.startswith(_TCP):
        return "127.0.0.1"
    host, _, port = meeting.removeprefix(_TCP).rpartition(":")
    family, kind, _, _, there = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # which sends nothing
        probe.connect(there)
        own: str = probe.getsockname()[0]
        return own


def in_turn(ranks: Collectives, x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Rows that have passed through the ranks' stages, one after another, on every rank.

    Args:
        ranks: the ranks; those of a stage compute the same rows, and the first of them passes them on.
        x: rows that the first stage begins with, of every rank.
        compute: function by which this rank's stage makes rows of rows, and may overwrite them.
    """
    if ranks.parallel.pp == 1:
        return compute(x)
    first = ranks.in_stage.parallel.rank == 0
    for stage in range(ranks.parallel.pp):
        rows = compute(x) if stage == ranks.parallel.stage else x
        x = ranks.sum(rows if stage == ranks.parallel.stage and first else torch.zeros_like(x))
    return x


def own_rows(x: torch.Tensor, counts: Sequence[int], rank: int) -> torch.Tensor:
    """Rows of a rank among those of all, of which each has so many."""
    return x[sum(counts[:rank]) : sum(counts[: rank + 1])]


def swap(ranks: Collectives, content: bytes) -> list[bytes]:
    """Passes bytes to all ranks, which all call this. Returns those of all, in their order."""
    count = ranks.parallel.ranks
    lengths = ranks.gather(torch.tensor([[len(content)]], dtype=torch.int32), [1] * count)[0].tolist()
    own = torch.zeros((1, max(*lengths, 1)), dtype=torch.int32)
    own[0, : len(content)] = torch.tensor(list(content), dtype=torch.int32)
    every = ranks.gather(own, [own.shape[1]] * count).view(count, -1)
    return [bytes(row[:length].tolist()) for row, length in zip(every, lengths)]
