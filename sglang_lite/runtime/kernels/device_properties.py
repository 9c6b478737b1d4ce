"""Properties of a GPU that launches depend on: resources of a program, and number of concurrent
programs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """Properties of a GPU, or of a stand-in for one.

    Attributes:
        name: name that the driver reports.
        shared_memory: bytes of shared memory available to a program.
        registers: 32-bit registers of a multiprocessor.
        multiprocessors: number of multiprocessors.
        capability: compute capability.
    """

    name: str
    shared_memory: int
    registers: int
    multiprocessors: int
    capability: tuple[int, int]

    @property
    def programs_to_fill(self) -> int:
        """Number of programs that keep the GPU busy if many fit a multiprocessor."""
        return 2 * self.multiprocessors

    @property
    def has_pdl(self) -> bool:
        """True if a kernel can be set up while the previous one drains (programmatic dependent
        launch).
        """
        return self.capability >= (9, 0)

    @property
    def has_tma(self) -> bool:
        """True if tiles can be copied in bulk (TMA)."""
        return self.capability >= (9, 0) or self == INTERPRETER


# The interpreter has unlimited resources, and runs programs one after the other.
INTERPRETER = DeviceProperties("Triton's interpreter", 1 << 30, 1 << 16, 8, (0, 0))

_assumed: ContextVar[DeviceProperties] = ContextVar("_assumed")


def properties_of(device: torch.device) -> DeviceProperties:
    """Returns the properties of the GPU on which a device's kernels run. For the device "meta",
    returns the properties that `assume_device` has set.
    """
    if device.type == "meta":
        return _assumed.get()
    return _gpu_properties(device) if device.type == "cuda" else INTERPRETER


@contextmanager
def assume_device(properties: DeviceProperties) -> Iterator[None]:
    """Lets tensors without memory (device "meta") stand for tensors on a GPU within a `with` block,
    so that the launches for this GPU can be determined on other machines.
    """
    token = _assumed.set(properties)
    try:
        yield
    finally:
        _assumed.reset(token)


@functools.cache
def _gpu_properties(device: torch.device) -> DeviceProperties:
    # torch's type lacks some attributes
    device_properties: Any = torch.cuda.get_device_properties(device)
    return DeviceProperties(
        name=device_properties.name,
        shared_memory=device_properties.shared_memory_per_block_optin,
        registers=device_properties.regs_per_multiprocessor,
        multiprocessors=device_properties.multi_processor_count,
        capability=(device_properties.major, device_properties.minor),
    )
