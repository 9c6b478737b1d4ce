"""Torch twin of `kernels.all_reduce`. It never waits: the other ranks' data must already have been
written by `send`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_lite.runtime.kernels.all_reduce import Peers, words_per_program


def sum_ranks(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    found = gather_ranks(x, peers).float()
    return sum(found[1:], found[0]).to(x.dtype)


def gather_ranks(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    found = exchange(_chunks(x), peers)
    return torch.cat(found, 1).view(x.dtype).view(peers.count, *x.shape)


def reduce_scatter(x: torch.Tensor, peers: Peers) -> torch.Tensor:
    send_each(x, peers)
    found = torch.cat(_receive_words(_chunks(x[0]), peers), 1).view(x.dtype).view(x.shape).float()
    return sum(found[1:], found[0]).to(x.dtype)


def send(parts: Sequence[torch.Tensor], peers: Peers) -> None:
    """Stores each program's int32 words in the memory of every rank."""
    for memory in peers.memories:
        _store_tagged_words(parts, peers, memory)


def send_each(x: torch.Tensor, peers: Peers) -> None:
    """Stores x[r] in the memory of each rank r, like the programs of `reduce_scatter`."""
    for part, memory in zip(x, peers.memories):
        _store_tagged_words(_chunks(part), peers, memory)


def _chunks(x: torch.Tensor) -> Sequence[torch.Tensor]:
    bits = x.view(-1).view(torch.int32)
    return torch.split(bits, words_per_program(len(bits)))


def _store_tagged_words(parts: Sequence[torch.Tensor], peers: Peers, memory: torch.Tensor) -> None:
    for program, (part, epoch) in enumerate(zip(parts, (peers.epochs + 1).tolist())):
        memory[epoch & 1, peers.rank, program, : len(part)] = (epoch << 32) | (
            part.long() & 0xFFFFFFFF
        )


def exchange(parts: Sequence[torch.Tensor], peers: Peers) -> list[torch.Tensor]:
    """Sends each program's words, and returns the words that it receives, int32 [ranks, words].

    Raises:
        RuntimeError: another rank has not sent its words yet.
    """
    send(parts, peers)
    return _receive_words(parts, peers)


def _receive_words(parts: Sequence[torch.Tensor], peers: Peers) -> list[torch.Tensor]:
    """Returns the words that each program has received, int32 [ranks, words]. A program receives as
    many words from each rank as it sends to each rank.
    """
    received: list[torch.Tensor] = []
    for program, part in enumerate(parts):
        peers.epochs[program] += 1
        epoch = int(peers.epochs[program])
        words = peers.memories[peers.rank][epoch & 1, :, program, : len(part)]
        if not bool((words >> 32 == epoch).all()):
            raise RuntimeError(f"not all ranks have sent the words of exchange {epoch}.")
        received.append(words.to(torch.int32))
    return received
