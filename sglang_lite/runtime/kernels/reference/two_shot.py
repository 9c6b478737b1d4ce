"""Torch twin of `kernels.two_shot`. It never waits: the other ranks' data must already have been
written, by `send_parts` on all ranks and then by `send_sum`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_lite.runtime.kernels.two_shot import PartPeers, flag_bytes


def sum_parts(x: torch.Tensor, peers: PartPeers) -> torch.Tensor:
    send_parts(x, peers)
    send_sum(x, peers)
    found = _receive_parts(1, x, peers)
    peers.epochs.add_(1)
    return found.view(x.shape)


def send_parts(x: torch.Tensor, peers: PartPeers) -> None:
    """Sends each rank its part of x, by storing it in that rank's memory."""
    _send(0, x.view(peers.count, -1), peers)


def send_sum(x: torch.Tensor, peers: PartPeers) -> None:
    """Sums the parts that this rank has received, and stores the sum in the memory of every rank.
    All ranks must have called `send_parts`.

    Args:
        x: numbers of the size and type that are summed.
        peers: memory of the ranks.
    """
    found = _receive_parts(0, x, peers).float()
    _send(1, [sum(found[1:], found[0]).to(x.dtype)] * peers.count, peers)


def _send(trip: int, parts: Sequence[torch.Tensor] | torch.Tensor, peers: PartPeers) -> None:
    epoch = int(peers.epochs[0]) + 1
    for memory, part in zip(peers.memories, parts):
        _view_exchange_parts(trip, part, memory, peers)[peers.rank] = part
        _view_flags(memory, peers)[trip, peers.rank] = epoch


def _receive_parts(trip: int, x: torch.Tensor, peers: PartPeers) -> torch.Tensor:
    """Returns the parts that this rank has received in trip 0 or 1, [ranks, part].

    Raises:
        RuntimeError: another rank has not sent its part yet.
    """
    memory = peers.memories[peers.rank]
    epoch = int(peers.epochs[0]) + 1
    if not bool((_view_flags(memory, peers)[trip] >= epoch).all()):
        raise RuntimeError(f"not all ranks have sent the parts of exchange {epoch}.")
    return _view_exchange_parts(trip, x.view(peers.count, -1)[0], memory, peers).clone()


def _view_flags(memory: torch.Tensor, peers: PartPeers) -> torch.Tensor:
    flags = memory[: flag_bytes(peers.count)].view(torch.int64)
    return flags[: 2 * peers.count * len(peers.epochs)].view(2, peers.count, -1)


def _view_exchange_parts(
    trip: int, part: torch.Tensor, memory: torch.Tensor, peers: PartPeers
) -> torch.Tensor:
    """Returns a view of a rank's memory: the part that the next exchange uses in trip 0 or 1. It is
    [ranks, part] in the data type of `part`.
    """
    places = memory[flag_bytes(peers.count) :].view(2, 2, peers.count, -1)
    return places[trip, (int(peers.epochs[0]) + 1) & 1].view(part.dtype)[:, : len(part)]
