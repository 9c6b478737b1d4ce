"""Exchanges of small tensors between ranks, by stores into each other's memory: all-reduce,
all-gather and reduce-scatter.

    out = x_0 + … + x_(n-1)     in this order on every rank, in float32: all have the same bits

A 64-bit word carries 32 bits of numbers and the epoch of the exchange, and is stored and loaded as
a whole. So a number has arrived as soon as its epoch has: one trip over the link, without flags or
fences (NCCL's protocol LL). Epochs are counted on the device, so captured exchanges can be
replayed.

Memory of a rank, int64: [2, senders, channels, words]. Program i uses channel i, and alternates
between the two halves. When a rank sends exchange e + 2 of a channel, it has received exchange
e + 1, which the other ranks sent only after reading exchange e.
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

CHANNELS = 256  # programs in one exchange
_CHUNK = 256  # fewest words of a program
_WORDS_PER_WARP = 128


@dataclass(frozen=True, slots=True)
class Peers:
    """Memory through which ranks exchange numbers, from one rank's point of view.

    Attributes:
        rank, count: this rank's number, and the number of ranks.
        words: words of a channel, a power of two.
        addresses: int64 [count], address of each rank's memory, int64 [2, count, CHANNELS, words],
            zero at first.
        epochs: int32 [CHANNELS], number of exchanges of each channel so far.
        memories: the ranks' memories that this process holds as tensors: its own; in tests, all of
            them.
    """

    rank: int
    count: int
    words: int
    addresses: torch.Tensor
    epochs: torch.Tensor
    memories: tuple[torch.Tensor, ...]

    @staticmethod
    def for_rank(rank: int, addresses: Sequence[int], *memories: torch.Tensor) -> Peers:
        """Creates the `Peers` of a rank that has not exchanged anything yet.

        Args:
            rank: this rank's number.
            addresses: address of each rank's memory, as this rank sees it.
            memories: as for Peers.
        """
        device = memories[0].device
        return Peers(
            rank,
            len(addresses),
            memories[0].shape[-1],
            torch.tensor(addresses, dtype=torch.int64, device=device),
            torch.zeros(CHANNELS, dtype=torch.int32, device=device),
            memories,
        )

    @property
    def max_bytes(self) -> int:
        """Largest size of one exchange, in bytes."""
        return 4 * self.words * CHANNELS

    def can_exchange_rows(self, rows: int, row_bytes: int) -> bool:
        """Returns whether rows of this number and size can be exchanged, one program for each row."""
        return rows <= CHANNELS and row_bytes <= 4 * self.words and row_bytes % 4 == 0


def rank_memory_shape(ranks: int, row_bytes: int) -> tuple[int, int, int, int]:
    """Returns the shape of the memory that a rank needs to exchange rows of `row_bytes` bytes."""
    return 2, ranks, CHANNELS, max(_CHUNK, round_up_to_power_of_2(cdiv(row_bytes, 4)))


def words_per_program(words: int) -> int:
    """Returns the number of words per program of `sum_ranks` and `gather_ranks`. It is small, since
    each program waits only for its own words.
    """
    return round_up_to_power_of_2(max(_CHUNK, cdiv(words, CHANNELS)))


@triton.jit
def _place(sender, epoch, channels, words, RANKS: tl.constexpr):
    """Returns the index in a rank's memory of what a sender stores in this program's channel."""
    half = (epoch & 1) * RANKS + sender
    return (half.to(tl.int64) * channels + tl.program_id(0)) * words


@triton.jit
def send(bits, at, inside, addresses, epoch, rank, channels, words, RANKS: tl.constexpr):
    """Stores int32 bits as the words `at` of this program, in the memory of every rank, its own
    too.
    """
    for peer in tl.static_range(RANKS):
        send_to(peer, bits, at, inside, addresses, epoch, rank, channels, words, RANKS)


@triton.jit
def send_to(peer, bits, at, inside, addresses, epoch, rank, channels, words, RANKS: tl.constexpr):
    """Stores int32 bits as the words `at` of this program in the memory of a rank."""
    word = (epoch.to(tl.int64) << 32) | (bits.to(tl.int64) & 0xFFFFFFFF)
    memory = tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(tl.int64)), 16)
    tl.store(memory + _place(rank, epoch, channels, words, RANKS) + at, word, mask=inside)


@triton.jit
def receive(sender, at, inside, addresses, epoch, rank, channels, words, RANKS: tl.constexpr):
    """Waits for the words `at` of a sender, and returns their bits."""
    memory = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(tl.int64)), 16)
    own = memory + _place(sender, epoch, channels, words, RANKS) + at
    word = tl.load(own, mask=inside, other=0, volatile=True)
    while tl.sum((inside & ((word >> 32).to(tl.int32) != epoch)).to(tl.int32), 0) > 0:
        word = tl.load(own, mask=inside, other=0, volatile=True)
    return word.to(tl.int32)


@triton.jit
def _packed(value, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Returns float32 numbers, rounded to a type, as int32: two in one if the type has 16 bits."""
    rounded = value.to(TYPE)
    if TYPE.primitive_bitwidth == 32:
        bits = rounded.to(tl.int32, bitcast=True)
    else:
        low, high = tl.split(tl.reshape(rounded.to(tl.int16, bitcast=True), [BLOCK // 2, 2]))
        bits = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    return bits


@triton.jit
def _unpacked(bits, TYPE: tl.constexpr, BLOCK: tl.constexpr):
    if TYPE.primitive_bitwidth == 32:
        value = bits.to(tl.float32, bitcast=True)
    else:
        pairs = tl.join(bits.to(tl.int16), (bits >> 16).to(tl.int16))
        value = tl.reshape(pairs, [BLOCK]).to(TYPE, bitcast=True).to(tl.float32)
    return value


@triton.jit
def summed(
    value,
    size,
    addresses,
    epochs,
    rank,
    channels,
    words,
    TYPE: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Returns the sum over ranks of a program's float32 numbers [BLOCK], of which the first `size`
    count, each rounded to a type first. Called once in a program, by all ranks' programs of this
    number.
    """
    count: tl.constexpr = BLOCK * TYPE.primitive_bitwidth // 32
    at = tl.arange(0, count)
    inside = at < size * TYPE.primitive_bitwidth // 32
    channel = epochs + tl.program_id(0)
    epoch = tl.load(channel) + 1
    send(_packed(value, TYPE, BLOCK), at, inside, addresses, epoch, rank, channels, words, RANKS)
    total = tl.zeros((BLOCK,), tl.float32)
    for sender in tl.static_range(RANKS):
        bits = receive(sender, at, inside, addresses, epoch, rank, channels, words, RANKS)
        total += _unpacked(bits, TYPE, BLOCK)
    tl.store(channel, epoch)
    return total


@cached_launch
@triton.jit(do_not_specialize=["total", "rank", "channels", "words"])
def _sum_ranks(
    x,
    out,
    total,
    addresses,
    epochs,
    rank,
    channels,
    words,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = first + tl.arange(0, BLOCK)
    wait(PDL)
    value = tl.load(x + at, mask=at < total, other=0.0).to(tl.float32)
    size = tl.minimum(total - first, BLOCK)
    value = summed(
        value, size, addresses, epochs, rank, channels, words, x.dtype.element_ty, BLOCK, RANKS
    )
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < total)


@cached_launch
@triton.jit(do_not_specialize=["total", "rank", "channels", "words"])
def _gather_ranks(
    x,
    out,
    total,
    addresses,
    epochs,
    rank,
    channels,
    words,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    at = tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * BLOCK + at
    inside = place < total
    wait(PDL)
    channel = epochs + tl.program_id(0)
    epoch = tl.load(channel) + 1
    send(
        tl.load(x + place, mask=inside, other=0),
        at,
        inside,
        addresses,
        epoch,
        rank,
        channels,
        words,
        RANKS,
    )
    for sender in tl.static_range(RANKS):
        bits = receive(sender, at, inside, addresses, epoch, rank, channels, words, RANKS)
        tl.store(out + sender * total + place, bits, mask=inside)
    tl.store(channel, epoch)


@cached_launch
@triton.jit(do_not_specialize=["total", "rank", "channels", "words"])
def _reduce_scatter(
    x,
    out,
    total,
    addresses,
    epochs,
    rank,
    channels,
    words,
    RANKS: tl.constexpr,
    WORDS: tl.constexpr,
    NUMBERS: tl.constexpr,
    PDL: tl.constexpr,
):
    start_next(PDL)
    at = tl.arange(0, WORDS)
    place = tl.program_id(0).to(tl.int64) * WORDS + at
    inside = place < total
    wait(PDL)
    channel = epochs + tl.program_id(0)
    epoch = tl.load(channel) + 1
    for peer in tl.static_range(RANKS):
        bits = tl.load(x + peer * total.to(tl.int64) + place, mask=inside, other=0)
        send_to(peer, bits, at, inside, addresses, epoch, rank, channels, words, RANKS)
    value = tl.zeros((NUMBERS,), tl.float32)
    for sender in tl.static_range(RANKS):
        bits = receive(sender, at, inside, addresses, epoch, rank, channels, words, RANKS)
        value += _unpacked(bits, out.dtype.element_ty, NUMBERS)
    number = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    tl.store(out + number, value.to(out.dtype.element_ty), mask=number < total * (NUMBERS // WORDS))
    tl.store(channel, epoch)


def sum_ranks(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Returns the sum of all ranks' x. All ranks must call this in the same order of exchanges.

    Args:
        x: contiguous, at most `peers.max_bytes`, and a multiple of 4 bytes.
        peers: memory of the ranks.
    """
    out = torch.empty_like(x)
    per_word = 4 // x.element_size()
    chunk = words_per_program(x.numel() // per_word)
    _sum_ranks[(cdiv(x.numel(), chunk * per_word),)](
        x,
        out,
        x.numel(),
        peers.addresses,
        peers.epochs,
        peers.rank,
        CHANNELS,
        peers.words,
        RANKS=peers.count,
        BLOCK=chunk * per_word,
        num_warps=warps_per_exchange(chunk),
        **pdl_options(x.device),
    )
    return out


def gather_ranks(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Returns all ranks' x, as [ranks, ...]. Takes the same arguments as `sum_ranks`."""
    bits = x.view(-1).view(torch.int32)
    out = bits.new_empty((peers.count, len(bits)))
    chunk = words_per_program(len(bits))
    _gather_ranks[(cdiv(len(bits), chunk),)](
        bits,
        out,
        len(bits),
        peers.addresses,
        peers.epochs,
        peers.rank,
        CHANNELS,
        peers.words,
        RANKS=peers.count,
        BLOCK=chunk,
        num_warps=warps_per_exchange(chunk),
        **pdl_options(x.device),
    )
    return out.view(x.dtype).view(peers.count, *x.shape)


def reduce_scatter(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Returns the sum over all ranks of x[r], where r is this rank. A rank sends 1 / ranks of what
    it sends for `sum_ranks`.

    Args:
        x: [ranks, ...], contiguous; x[0] has at most `peers.max_bytes`, and a multiple of 4 bytes.
        peers: memory of the ranks.
    """
    bits = x.view(peers.count, -1).view(torch.int32)
    out = torch.empty_like(x[0])
    chunk = words_per_program(bits.shape[1])
    per_word = 4 // x.element_size()
    _reduce_scatter[(cdiv(bits.shape[1], chunk),)](
        bits,
        out,
        bits.shape[1],
        peers.addresses,
        peers.epochs,
        peers.rank,
        CHANNELS,
        peers.words,
        RANKS=peers.count,
        WORDS=chunk,
        NUMBERS=chunk * per_word,
        num_warps=warps_per_exchange(chunk),
        **pdl_options(x.device),
    )
    return out


def warps_per_exchange(words: int) -> int:
    """Returns the number of warps of a program that exchanges this many words."""
    return min(max(words // _WORDS_PER_WARP, 1), 16)
