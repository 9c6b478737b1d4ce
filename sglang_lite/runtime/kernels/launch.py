"""Launch parameters of attention kernels, within the room of a program's registers and shared memory."""

from __future__ import annotations

import functools
from typing import Any

import torch

FLOAT32 = {"BLOCK_N": 16, "num_warps": 4, "num_stages": 2}  # products are not by matrix units, and unrolled
FLOAT32_QUERIES = 16  # of a program


def fitted(launch: dict[str, int], queries: int, dim: int, item: int, device: torch.device) -> dict[str, int]:
    """A launch whose blocks of keys and values find room in the device's shared memory.

    Args:
        launch: BLOCK_N, num_warps and num_stages; BLOCK_N is halved as often as need be.
        queries: of a program.
        dim: of a head, as the kernel pads it.
        item: bytes of an element of keys.
    """
    tokens = launch["BLOCK_N"]
    while tokens > 16 and (2 * launch["num_stages"] * tokens + queries) * dim * item > _room(device):
        tokens //= 2
    return {**launch, "BLOCK_N": tokens}


@functools.cache
def _room(device: torch.device) -> int:
    """Bytes of shared memory that a program can have."""
    if device.type != "cuda":
        return 1 << 30
    properties: Any = torch.cuda.get_device_properties(device)  # torch leaves out some
    return int(properties.shared_memory_per_block_optin)
