"""Sum of many numbers over ranks, by stores into each other's memory (two-shot all-reduce).

    out = x_0 + … + x_(n-1)     in this order on every rank, in float32: all have the same bits

Each rank receives its part of every x, sums it, and sends the sum to all. So a rank sends
2 (n - 1) / n times the size of x. One shot (`kernels.all_reduce`) sends 2 (n - 1) times its size,
as half of each word is the epoch. But two shots take two trips, one after the other, and each trip
ends with a flag after a fence.

Memory of a rank, bytes: flags, int64 [2 trips, ranks, programs], each the last exchange of which a
rank's program has sent everything; then [2 trips, 2, ranks, part], the data of even-numbered and of
odd-numbered exchanges. A rank that sends exchange e + 2 has received all of e + 1, so all ranks
have finished e. Exchanges are counted on the device, and may be captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sglang_lite.runtime.kernels.launcher import cached_launch
from sglang_lite.runtime.kernels.pdl import pdl_options, start_next, wait
from sglang_lite.runtime.kernels.sizes import cdiv, round_up_to_power_of_2

PROGRAMS = 128  # of each sum; they wait for one another, so all must run concurrently
MAX_BYTES = 1 << 24  # of a sum
_LINE = 16  # bytes of a thread's store
# least and most bytes of a tile, which has a thread for each of its stores
_BLOCK_BYTES = 2048, 8192


@dataclass(frozen=True, slots=True)
class PartPeers:
    """Memory through which ranks sum large tensors, from one rank's point of view.

    Attributes:
        rank, count: this rank's number, and the number of ranks.
        addresses: int64 [count], address of each rank's memory, which is zero at first.
        epochs: int64 [programs], number of exchanges of each program so far.
        memories: the ranks' memories that this process holds as tensors, uint8: its own; in tests,
            all of them.
    """

    rank: int
    count: int
    addresses: torch.Tensor
    epochs: torch.Tensor
    memories: tuple[torch.Tensor, ...]

    @staticmethod
    def for_rank(
        rank: int, addresses: Sequence[int], *memories: torch.Tensor, programs: int = PROGRAMS
    ) -> PartPeers:
        """Creates the `PartPeers` of a rank that has not exchanged anything yet. `programs` is the
        number of programs per sum; other arguments as for `Peers.for_rank`.
        """
        device = memories[0].device
        return PartPeers(
            rank,
            len(addresses),
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(programs, dtype=torch.int64, device=device),
            memories,
        )

    def can_sum(self, x: torch.Tensor) -> bool:
        """Returns whether tensors of x's size can be summed."""
        return x.nbytes <= MAX_BYTES and x.nbytes % (self.count * _LINE) == 0


def part_bytes(ranks: int) -> int:
    """Returns the maximum size of the part that each rank sums, in bytes."""
    return MAX_BYTES // ranks // _LINE * _LINE


def flag_bytes(ranks: int) -> int:
    """Returns the size of the flags in a rank's memory, in bytes."""
    return 2 * ranks * PROGRAMS * 8


def memory_bytes(ranks: int) -> int:
    """Returns the size of a rank's memory, in bytes."""
    return flag_bytes(ranks) + 2 * 2 * ranks * part_bytes(ranks)


@triton.jit
def _there(
    memory,
    trip,
    epoch,
    owner,
    FLAG_BYTES: tl.constexpr,
    PART_BYTES: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Returns the address, in a rank's memory, of what a trip of an exchange brings from an owner."""
    return memory + FLAG_BYTES + ((trip * 2 + (epoch & 1)) * RANKS + owner) * PART_BYTES


@triton.jit
def _flags(memories, trip, owner, RANKS: tl.constexpr):
    """Returns pointers to this program's flags of an owner, in the memories of ranks."""
    at = (trip * RANKS + owner) * tl.num_programs(0) + tl.program_id(0)
    return memories.to(tl.pointer_type(tl.int64)) + at


@triton.jit
def _tell(memories, trip, rank, epoch, inside, RANKS: tl.constexpr):
    """Tells all ranks that this program has stored all that it sends in a trip."""
    tl.debug_barrier()  # behind the stores of all threads, which the release of one then covers
    tl.atomic_max(
        _flags(memories, trip, rank, RANKS), epoch, mask=inside, sem="release", scope="sys"
    )


@triton.jit
def _await(own, trip, ranks, epoch, inside, RANKS: tl.constexpr):
    """Waits until all ranks have called `_tell` for this trip."""
    flags = _flags(own, trip, ranks, RANKS)
    came = tl.load(flags, mask=inside, other=0, volatile=True)
    while tl.sum((inside & (came < epoch)).to(tl.int32), 0) > 0:
        came = tl.load(flags, mask=inside, other=0, volatile=True)
    tl.atomic_max(flags, 0, mask=inside, sem="acquire", scope="sys")
    tl.debug_barrier()


@cached_launch
@triton.jit(do_not_specialize=["rank"])
def _sum_parts(
    x,
    out,
    part,
    addresses,
    epochs,
    rank,
    FLAG_BYTES: tl.constexpr,
    PART_BYTES: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    program, programs = tl.program_id(0), tl.num_programs(0)
    ranks = tl.arange(0, WIDTH)
    inside = ranks < RANKS
    memories, own = tl.load(addresses + ranks, mask=inside, other=0), tl.load(addresses + rank)
    kind: tl.constexpr = tl.pointer_type(x.dtype.element_ty)
    tiles = tl.cdiv(part, BLOCK)
    wait(PDL)
    # behind the wait: the exchange before may be running until then
    epoch = tl.load(epochs + program) + 1
    for tile in range(program, tiles, programs):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        for peer in tl.static_range(RANKS):
            there = _there(
                tl.load(addresses + peer), 0, epoch, rank, FLAG_BYTES, PART_BYTES, RANKS
            ).to(kind)
            there = tl.multiple_of(there, 16)
            tl.store(
                there + at, tl.load(x + peer * part + at, mask=at < part, other=0.0), mask=at < part
            )
    _tell(memories, 0, rank, epoch, inside, RANKS)
    _await(own, 0, ranks, epoch, inside, RANKS)
    for tile in range(program, tiles, programs):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for sender in tl.static_range(RANKS):
            came = tl.multiple_of(
                _there(own, 0, epoch, sender, FLAG_BYTES, PART_BYTES, RANKS).to(kind), 16
            )
            total += tl.load(came + at, mask=at < part, other=0.0, cache_modifier=".cg").to(
                tl.float32
            )
        value = total.to(x.dtype.element_ty)
        for peer in tl.static_range(RANKS):
            there = _there(
                tl.load(addresses + peer), 1, epoch, rank, FLAG_BYTES, PART_BYTES, RANKS
            ).to(kind)
            tl.store(tl.multiple_of(there, 16) + at, value, mask=at < part)
    _tell(memories, 1, rank, epoch, inside, RANKS)
    _await(own, 1, ranks, epoch, inside, RANKS)
    for tile in range(program, tiles, programs):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        for owner in tl.static_range(RANKS):
            came = tl.multiple_of(
                _there(own, 1, epoch, owner, FLAG_BYTES, PART_BYTES, RANKS).to(kind), 16
            )
            value = tl.load(came + at, mask=at < part, other=0.0, cache_modifier=".cg")
            tl.store(out + owner * part + at, value, mask=at < part)
    tl.store(epochs + program, epoch)


def sum_parts(x: torch.Tensor, peers: PartPeers) -> torch.Tensor:
    """Returns the sum of all ranks' x. All ranks must call this in the same order of exchanges.

    Args:
        x: contiguous, of a size that `PartPeers` accepts.
        peers: memory of the ranks.
    """
    out = torch.empty_like(x)
    part = x.numel() // peers.count
    size = x.element_size()
    least, most = _BLOCK_BYTES
    programs = len(peers.epochs)
    block = min(max(round_up_to_power_of_2(cdiv(part * size, programs)), least), most)
    _sum_parts[(programs,)](
        x,
        out,
        part,
        peers.addresses,
        peers.epochs,
        peers.rank,
        FLAG_BYTES=flag_bytes(peers.count),
        PART_BYTES=part_bytes(peers.count),
        RANKS=peers.count,
        WIDTH=round_up_to_power_of_2(peers.count),
        BLOCK=block // size,
        num_warps=block // _LINE // 32,
        **pdl_options(x.device),
    )
    return out
