"""Collective operations of an engine's ranks: sums, and tensors gathered in the order of the ranks.

Each engine has separate groups. Torch's default group, the only one in a process, is never used.
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
    """Operations in which every rank takes part, with tensors of the same shape and dtype and in
    the same order.

    Attributes:
        parallel: layout of the ranks.
        in_stage: collectives of the ranks that have the same layers as this one.
    """

    @property
    def parallel(self) -> Parallel: ...

    @property
    def in_stage(self) -> Collectives: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' tensors on every rank, possibly in the memory of `x`."""
        ...

    def sum_and_scatter_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Returns this rank's rows of the sum of all ranks' tensors.

        Args:
            x: this rank's tensor, with the rows of all ranks.
            counts: number of each rank's rows.
        """
        ...

    def gather_columns(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
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

    def sum_and_scatter_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return x

    def gather_columns(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return x


ONE_PROCESS = OneProcess()


def import_torch_distributed() -> Any:  # its types lack the names used here
    """Returns the module `torch.distributed`."""
    from torch import distributed  # slow to import

    return distributed


class _GlooGroup:
    """Collectives over one gloo group, whose processes find each other through a torch store."""

    def __init__(self, parallel: Parallel, store: Any, options: Any) -> None:
        self.parallel = parallel
        self.in_stage: Collectives = self
        self._group = import_torch_distributed().ProcessGroupGloo(
            store, parallel.rank, parallel.ranks, options
        )

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        return x

    def sum_and_scatter_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        return rows_of_rank(self.sum(x), counts, self.parallel.rank)

    def gather_columns(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        most = max(sizes)
        padded = torch.nn.functional.pad(x, (0, most - x.shape[1]))
        parts = [torch.empty_like(padded) for _ in sizes]
        self._group.allgather([parts], [padded.contiguous()]).wait()
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes)], 1)


class GlooCollectives(_GlooGroup):
    """Collectives of processes on CPUs.

    Args:
        parallel: layout of the ranks, and this rank's place in it.
        meeting: for ranks on one machine, path of a file through which they find each other, in a
            folder that other users can't read. For ranks on several machines, "tcp://host:port",
            where rank 0 listens.
        timeout_s: time after which an operation fails if not all ranks have begun it.

    Raises:
        RuntimeError: not all ranks arrived within `timeout_s`. Collectives raise it if another rank
            has ended.
    """

    def __init__(self, parallel: Parallel, meeting: Path | str, timeout_s: float) -> None:
        group = import_torch_distributed().ProcessGroupGloo
        options = group._Options()  # noqa: SLF001  # torch has no other name for it
        options._timeout = timedelta(seconds=timeout_s)  # noqa: SLF001  # the same
        options._devices = [group.create_device(hostname=_own_address(str(meeting)))]  # noqa: SLF001  # the same
        store = open_rank_store(str(meeting), parallel, timeout_s)
        super().__init__(parallel, store, options)
        if parallel.pp > 1:
            alone = parallel.tp == 1
            own = parallel.in_stage
            self.in_stage = (
                ONE_PROCESS
                if alone
                else _GlooGroup(own, open_stage_store(store, parallel), options)
            )
        self.sum(torch.zeros(1))  # all have met, so the file may be deleted


def open_rank_store(meeting: str, parallel: Parallel, timeout_s: float) -> Any:  # of torch
    """Opens the store through which ranks find each other. Takes the same arguments as
    `GlooCollectives`.

    Raises:
        BackendError: the port is in use, or rank 0 can't be reached.
    """
    if not meeting.startswith(_TCP):
        return import_torch_distributed().FileStore(meeting, parallel.ranks)
    host, _, port = meeting.removeprefix(_TCP).rpartition(":")
    try:
        return import_torch_distributed().TCPStore(
            host,
            int(port),
            parallel.ranks,
            parallel.rank == 0,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        what = "listen at" if parallel.rank == 0 else "reach rank 0 at"
        raise BackendError(
            f"dist_init_addr: rank {parallel.rank} can't {what} {host}:{port}: {str(error).partition(chr(10))[0]}.",
            hint="The two ports behind that of dist_init_addr must be free on machine 0, and let through.",
        ) from error


def open_stage_store(store: Any, parallel: Parallel) -> Any:  # of torch
    """Returns the section of the common store in which the ranks of this rank's stage find each
    other.
    """
    return import_torch_distributed().PrefixStore(f"stage {parallel.stage}", store)


def _own_address(meeting: str) -> str:
    """Returns the address at which other ranks reach this one: the loopback address, or the one
    from which it reaches rank 0.
    """
    if not meeting.startswith(_TCP):
        return "127.0.0.1"
    host, _, port = meeting.removeprefix(_TCP).rpartition(":")
    family, kind, _, _, there = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # sends nothing
        probe.connect(there)
        own: str = probe.getsockname()[0]
        return own


def run_stages_in_turn(
    ranks: Collectives, x: torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Passes rows through the ranks' stages one after another, and returns the result on every
    rank.

    Args:
        ranks: the ranks; those of a stage compute the same rows, and the first of them passes them
            on.
        x: rows with which the first stage begins, on every rank.
        compute: function that applies this rank's stage to rows, which it may overwrite.
    """
    if ranks.parallel.pp == 1:
        return compute(x)
    first = ranks.in_stage.parallel.rank == 0
    for stage in range(ranks.parallel.pp):
        rows = compute(x) if stage == ranks.parallel.stage else x
        x = ranks.sum(rows if stage == ranks.parallel.stage and first else torch.zeros_like(x))
    return x


def rows_of_rank(x: torch.Tensor, counts: Sequence[int], rank: int) -> torch.Tensor:
    """Returns one rank's rows from `x`, which has the rows of all ranks. `counts` gives the number
    of each rank's rows.
    """
    return x[sum(counts[:rank]) : sum(counts[: rank + 1])]


def exchange_bytes(ranks: Collectives, content: bytes) -> list[bytes]:
    """Sends bytes to all ranks, and returns every rank's bytes in the order of the ranks. All ranks
    must call this.
    """
    count = ranks.parallel.ranks
    lengths = ranks.gather_columns(torch.tensor([[len(content)]], dtype=torch.int32), [1] * count)[
        0
    ].tolist()
    own = torch.zeros((1, max(*lengths, 1)), dtype=torch.int32)
    own[0, : len(content)] = torch.tensor(list(content), dtype=torch.int32)
    every = ranks.gather_columns(own, [own.shape[1]] * count).view(count, -1)
    return [bytes(row[:length].tolist()) for row, length in zip(every, lengths)]
