"""Collectives of ranks on GPUs: stores into each other's memory up to a size limit, NCCL above it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from sglang_lite.runtime.kernels.all_reduce import Peers, gather_ranks, reduce_scatter, sum_ranks
from sglang_lite.runtime.kernels.peer_memory import share_memory
from sglang_lite.runtime.kernels.sampling import BLOCK
from sglang_lite.runtime.kernels.sizes import cdiv
from sglang_lite.runtime.kernels.two_shot import PartPeers, sum_parts
from sglang_lite.runtime.parallel.collectives import (
    ONE_PROCESS,
    Collectives,
    exchange_bytes,
    import_torch_distributed,
    open_rank_store,
    open_stage_store,
    rows_of_rank,
)
from sglang_lite.runtime.parallel.layout import Parallel

logger = logging.getLogger("sglang_lite")

# Most bytes that a rank sends in a one-shot sum; larger sums go by parts or through NCCL.
ONE_SHOT = 1 << 21
_TIMEOUT_S = 300.0  # for ranks to connect; they have already met
# bytes of NCCL's first sums, in which it connects the GPUs: that must not happen during graph
# capture
_FIRST = (1 << 22, 1 << 26)


class LargeSums(Protocol):
    """NCCL operations for large tensors: sums and gathers over all ranks, and transfers between two
    ranks.
    """

    def sum(self, x: torch.Tensor) -> None: ...

    def gather_into(self, out: torch.Tensor, x: torch.Tensor) -> None: ...

    def send(self, x: torch.Tensor, rank: int) -> None: ...

    def receive(self, out: torch.Tensor, rank: int) -> None: ...


class GpuRanks:
    """Collectives of ranks on GPUs of one machine. All of them can be captured in CUDA graphs.

    Args:
        parallel: layout of the ranks.
        peers: memory through which ranks exchange numbers; None without peer access.
        nccl: NCCL's operations; None if ranks share a GPU, which NCCL does not support.
        in_stage: collectives of this stage's ranks, if there are several stages.
        parts: memory through which ranks sum larger tensors; None in the same cases as
            `peers`.
    """

    def __init__(
        self,
        parallel: Parallel,
        peers: Peers | None,
        nccl: LargeSums | None = None,
        in_stage: Collectives | None = None,
        parts: PartPeers | None = None,
    ) -> None:
        self.parallel = parallel
        self.peers = peers
        self.nccl = nccl
        self.parts = parts
        self.in_stage: Collectives = in_stage or self

    def peers_for_fused_sum(self, rows: int, row_bytes: int) -> Peers | None:
        """Returns the memory through which ranks sum rows inside the kernel that reads the sum.
        Returns None if a separate step sums the rows.
        """
        peers = self.peers
        fits = (
            peers is not None
            and rows * row_bytes <= self._sum_limit(peers)
            and peers.can_exchange_rows(rows, row_bytes)
        )
        return peers if fits else None

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        peers = self.peers
        if peers is not None and _fits_in_exchange(x, self._sum_limit(peers)):
            return sum_ranks(x, peers)
        if self.parts is not None and self.parts.can_sum(x):
            return sum_parts(x, self.parts)
        if self.nccl is not None:
            self.nccl.sum(x)
            return x
        return torch.cat([sum_ranks(piece, self._pieces) for piece in self._split_pieces(x)]).view(
            x.shape
        )

    def sum_and_scatter_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        parts = x.contiguous().view(len(counts), -1) if min(counts) == max(counts) else None
        peers = self.peers
        if (
            parts is not None
            and peers is not None
            and _fits_in_exchange(parts[0], self._exchange_limit(peers))
        ):
            return reduce_scatter(parts, peers).view(counts[0], *x.shape[1:])
        return rows_of_rank(self.sum(x), counts, self.parallel.rank)

    def stack(self, x: torch.Tensor) -> torch.Tensor:
        """Returns every rank's x, stacked as [ranks, ...]."""
        x = x.contiguous()
        peers = self.peers
        if peers is not None and _fits_in_exchange(x, self._exchange_limit(peers)):
            return gather_ranks(x, peers)
        if self.nccl is not None:
            out = x.new_empty((self.parallel.ranks, *x.shape))
            self.nccl.gather_into(out, x)
            return out
        parts = [gather_ranks(piece, self._pieces) for piece in self._split_pieces(x)]
        return torch.cat(parts, 1).view(self.parallel.ranks, *x.shape)

    def gather_columns(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        most = max(sizes)
        parts = self.stack(x if x.shape[1] == most else F.pad(x, (0, most - x.shape[1])))
        if len(x) == 1 and min(sizes) == most:
            return parts.view(1, -1)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes)], 1)

    def pass_to_next_stage(self, x: torch.Tensor, stage: int) -> torch.Tensor:
        """Passes rows from each rank of a stage to the corresponding rank of the next stage.

        Args:
            x: rows, on ranks of the stage; on others, memory for as many, which may be written.
            stage: the stage.

        Returns:
            The rows, on ranks of the next stage; on others, anything.
        """
        own = self.parallel.stage
        parallel = self.parallel
        x = x.contiguous()
        if self.nccl is None:
            return self.sum(
                x if own == stage and parallel.in_stage.rank == 0 else torch.zeros_like(x)
            )
        if own == stage:
            self.nccl.send(x, parallel.rank + parallel.tp)
        elif own == stage + 1:
            self.nccl.receive(x, parallel.rank - parallel.tp)
        return x

    def _exchange_limit(self, peers: Peers) -> int:
        """Returns the maximum size in bytes of a tensor that ranks exchange by writing it to each
        other's memory.
        """
        return min(ONE_SHOT // (self.parallel.ranks - 1), peers.max_bytes) // 4 * 4  # whole words

    def _sum_limit(self, peers: Peers) -> int:
        """Returns the maximum size in bytes of a tensor that ranks sum by exchanging it whole.
        Larger tensors may be summed in parts, which sends fewer bytes. If that is possible and
        there are more than two ranks, the limit is lower than `_exchange_limit`.
        """
        pairs = self.parallel.ranks * (self.parallel.ranks - 1) // 2
        return (
            self._exchange_limit(peers)
            if self.parts is None
            else min(ONE_SHOT // pairs, self._exchange_limit(peers))
        )

    @property
    def _pieces(self) -> Peers:
        assert self.peers is not None, "ranks that share a GPU have access to its memory"
        return self.peers

    def _split_pieces(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.split(x.view(-1), self._exchange_limit(self._pieces) // x.element_size())


def _fits_in_exchange(x: torch.Tensor, most: int) -> bool:
    return x.nbytes <= most and x.nbytes % 4 == 0


def broadcast_last_stage(ranks: Collectives, x: torch.Tensor) -> torch.Tensor:
    """Copies the last stage's rows to every rank. x has the same shape on all ranks."""
    last = ranks.parallel.rank == ranks.parallel.ranks - 1  # all of its stage have the same rows
    return ranks.sum(x if last else torch.zeros_like(x))


@dataclass(frozen=True, slots=True)
class LogitParts:
    """How the logits of a step are divided among ranks.

    Attributes:
        ranks: the ranks.
        sizes: number of tokens of each rank's part of the vocabulary; all but the last are
            multiples of BLOCK.
    """

    ranks: GpuRanks
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of tokens in this rank's part."""
        return self.sizes[self.ranks.parallel.rank]

    @property
    def first_block(self) -> int:
        """Index of the first token block in this rank's part; a block is BLOCK tokens."""
        return sum(self.sizes[: self.ranks.parallel.rank]) // BLOCK

    @property
    def max_blocks(self) -> int:
        """Number of token blocks in the largest part."""
        return cdiv(max(self.sizes), BLOCK)

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the full logits [R, vocab_size] on every rank, given this rank's part [R, size]."""
        return self.ranks.gather_columns(logits, self.sizes)

    def words(self, masks: torch.Tensor) -> torch.Tensor:
        """Returns the columns of bit masks int32 [masks, words] that cover this rank's tokens."""
        start = self.first_block * BLOCK // 32
        return masks[:, start : start + cdiv(self.size, 32)]


class _Nccl:
    """NCCL's operations, through a torch process group that is not the default group.

    Args:
        parallel: layout of the ranks.
        store: torch store through which the ranks find one another.
        device: this rank's GPU.
    """

    def __init__(self, parallel: Parallel, store: Any, device: torch.device) -> None:
        group = import_torch_distributed().ProcessGroupNCCL
        self._group = group(store, parallel.rank, parallel.ranks, group.Options())
        with torch.cuda.device(device):
            for size in _FIRST:
                self.sum(first := torch.zeros(size, dtype=torch.uint8, device=device))
            if parallel.stage > 0:
                self.receive(first, parallel.rank - parallel.tp)
            if parallel.stage < parallel.pp - 1:
                self.send(first, parallel.rank + parallel.tp)
            torch.cuda.synchronize(device)

    def sum(self, x: torch.Tensor) -> None:
        self._group.allreduce([x]).wait()

    def gather_into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        self._group.allgather([list(out.unbind(0))], [x]).wait()

    def send(self, x: torch.Tensor, rank: int) -> None:
        self._group.send([x], rank, 0).wait()

    def receive(self, out: torch.Tensor, rank: int) -> None:
        self._group.recv([out], rank, 0).wait()


def connect(
    host: Collectives,
    device: torch.device,
    row_bytes: int,
    *,
    own_sum: bool = True,
    meeting: str | None = None,
) -> Collectives:
    """Connects the ranks' GPUs for collectives. All ranks must call this.

    Args:
        host: collectives of the ranks' processes.
        device: this rank's GPU.
        row_bytes: bytes of a row of hidden states.
        own_sum: whether to exchange rows by stores; False for NCCL only.
        meeting: where the ranks of several machines find one another for NCCL, which then does
            all sums; None on one machine.
    """
    if meeting is not None:
        return _connect_ranks(
            host, device, None, open_rank_store(meeting, host.parallel, _TIMEOUT_S)
        )
    rank = host.parallel.rank
    index = device.index or 0
    devices = [
        int.from_bytes(each, "big") for each in exchange_bytes(host, index.to_bytes(4, "big"))
    ]
    if len(set(devices)) < len(devices):
        return _connect_ranks(host, device, row_bytes, None)
    reaches = all(
        other == index or torch.cuda.can_device_access_peer(index, other) for other in devices
    )
    all_reach = all(map(any, exchange_bytes(host, bytes([reaches]))))
    if not all_reach and rank == 0:
        logger.warning(
            "not all GPUs have access to one another's memory: NCCL sums, which takes longer for few rows."
        )
    # An anonymous file that disappears with rank 0's process.
    meeting = f"/proc/{os.getpid()}/fd/{os.memfd_create('nccl')}" if rank == 0 else ""
    store = open_rank_store(
        exchange_bytes(host, meeting.encode())[0].decode(), host.parallel, _TIMEOUT_S
    )
    return _connect_ranks(host, device, row_bytes if own_sum and all_reach else None, store)


def _connect_ranks(
    host: Collectives, device: torch.device, row_bytes: int | None, store: Any
) -> Collectives:
    """Builds the collectives once `connect` knows which GPUs reach each other.

    Args:
        host, device: as for `connect`.
        row_bytes: as for `connect`; None to exchange nothing by stores.
        store: torch store through which the ranks find one another for NCCL; None if they
            share a GPU.
    """
    parallel = host.parallel
    in_stage = None
    if parallel.ranks == 1:
        return ONE_PROCESS
    peers = None
    parts = None
    if row_bytes is not None:
        peers, parts = share_memory(
            parallel.rank, parallel.ranks, row_bytes, device, partial(exchange_bytes, host)
        )
    nccl = store and _Nccl(parallel, store, device)
    if parallel.pp > 1:
        in_stage = _connect_ranks(
            host.in_stage, device, row_bytes, store and open_stage_store(store, parallel)
        )
    return GpuRanks(parallel, peers, nccl, in_stage, parts)
