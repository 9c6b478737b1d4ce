"""The GPU as launches see it: what a program can have, and how many run at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU, or what stands for one.

    Attributes:
        name: as its driver tells it.
        shared: bytes of shared memory that a program can have.
        registers: of a multiprocessor, 32 bits each.
        multiprocessors: of the card.
        capability: compute capability.
    """

    name: str
    shared: int
    registers: int
    multiprocessors: int
    capability: tuple[int, int]

    @property
    def programs(self) -> int:
        """Programs that keep it busy, where each can have many."""
        return 2 * self.multiprocessors

    @property
    def overlaps(self) -> bool:
        """True where a kernel is set up while the one before drains (programmatic dependent launch)."""
        return self.capability >= (9, 0)

    @property
    def copies(self) -> bool:
        """True where tiles are copied in bulk (TMA)."""
        return self.capability >= (9, 0) or self == INTERPRETER


# It has room for everything, and runs programs one after the other.
INTERPRETER = Card("Triton's interpreter", 1 << 30, 1 << 16, 8, (0, 0))

_stood_for: ContextVar[Card] = ContextVar("_stood_for")


def card_of(device: torch.device) -> Card:
    """The card that kernels on a device run on; for "meta" the one that `standing_for` names."""
    if device.type == "meta":
        return _stood_for.get()
    return _found(device) if device.type == "cuda" else INTERPRETER


@contextmanager
def standing_for(card: Card) -> Iterator[None]:
    """Context in which tensors without memory (of the device "meta") are on that card, so that launches for it can be
    told where it is not."""
    token = _stood_for.set(card)
    try:
        yield
    finally:
        _stood_for.reset(token)


@functools.cache
def _found(device: torch.device) -> Card:
    own: Any = torch.cuda.get_device_properties(device)  # torch leaves out some
    return Card(
        name=own.name,
        shared=own.shared_memory_per_block_optin,
        registers=own.regs_per_multiprocessor,
        multiprocessors=own.multi_processor_count,
        capability=(own.major, own.minor),
    )
