"""GPU from the point of view of launches: resources of a program, and number of programs that run at once."""

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
    """GPU, or a stand-in for one.

    Attributes:
        name: name that the driver reports.
        shared: bytes of shared memory available to a program.
        registers: 32-bit registers of a multiprocessor.
        multiprocessors: number of multiprocessors.
        capability: compute capability.
    """

    name: str
    shared: int
    registers: int
    multiprocessors: int
    capability: tuple[int, int]

    @property
    def programs(self) -> int:
        """Number of programs that keep the card busy if many fit a multiprocessor."""
        return 2 * self.multiprocessors

    @property
    def overlaps(self) -> bool:
        """True if a kernel can be set up while the previous one drains (programmatic dependent launch)."""
        return self.capability >= (9, 0)

    @property
    def copies(self) -> bool:
        """True if tiles can be copied in bulk (TMA)."""
        return self.capability >= (9, 0) or self == INTERPRETER


# The interpreter has unlimited resources, and runs programs one after the other.
INTERPRETER = Card("Triton's interpreter", 1 << 30, 1 << 16, 8, (0, 0))

_stood_for: ContextVar[Card] = ContextVar("_stood_for")


def card_of(device: torch.device) -> Card:
    """Returns the card that kernels on a device run on; for "meta", the one set by `standing_for`."""
    if device.type == "meta":
        return _stood_for.get()
    return _found(device) if device.type == "cuda" else INTERPRETER


@contextmanager
def standing_for(card: Card) -> Iterator[None]:
    """Context in which tensors without memory (device "meta") stand for tensors on a card, so that launches for it can
    be determined on other machines."""
    token = _stood_for.set(card)
    try:
        yield
    finally:
        _stood_for.reset(token)


@functools.cache
def _found(device: torch.device) -> Card:
    own: Any = torch.cuda.get_device_properties(device)  # torch's type lacks some attributes
    return Card(
        name=own.name,
        shared=own.shared_memory_per_block_optin,
        registers=own.regs_per_multiprocessor,
        multiprocessors=own.multi_processor_count,
        capability=(own.major, own.minor),
    )
