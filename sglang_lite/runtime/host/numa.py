"""Binds threads to cores near a device. On a machine with several sockets, each part of the memory
is near the cores of one of them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_DEVICES = Path("/sys/bus/pci/devices")


def bind_to_cores_near(address: str, devices: Path = _DEVICES) -> None:
    """Restricts this thread, and those it starts, to the cores near a device.

    Does nothing if Linux doesn't report any such core that the thread may use.

    Args:
        address: address of the device on its bus, such as "0000:3b:00.0".
        devices: folder in which Linux describes devices.
    """
    if sys.platform != "linux":
        return
    try:
        text = (devices / address.lower() / "local_cpulist").read_text()
    except OSError:
        return
    if near := _parse_cpu_list(text) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, near)


def _parse_cpu_list(text: str) -> set[int]:
    """Parses a list of numbers like "0-3,8"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found
