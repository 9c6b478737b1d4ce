"""Memory that a model takes at least, and memory that is free, before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.spec import ModelSpec


def weight_bytes(spec: ModelSpec, item: float) -> int:
    """Bytes of a model's matrices, at least.

    Args:
        item: bytes of a number.
    """
    tables = 1 if spec.tied_embeddings else 2
    layers = sum(layer.numbers(spec.hidden_size) for layer in spec.layers)
    return int((tables * spec.vocab_size * spec.hidden_size + layers) * item)


def rotary_bytes(spec: ModelSpec, positions: int) -> int:
    """Bytes of the rotary tables for so many positions, at least."""
    size = spec.layers[0].attention.key_size
    return sum(positions * (rope.rotary_dim or size) * 4 for rope in spec.ropes)


def check_room(parts: Mapping[str, int], device: torch.device, source: str, hint: str) -> None:
    """Checks that memory is free for all parts of a model.

    Args:
        parts: bytes that are going to be allocated, by what for.
        source: for the message.
        hint: what to change.

    Raises:
        ModelError: there is less; the message has the numbers.
    """
    needed, free = sum(parts.values()), free_bytes(device)
    if free is not None and needed > free:
        listed = ", ".join(f"{name} {_gib(count)}" for name, count in parts.items())
        raise ModelError(f"{source}: needs {_gib(needed)} ({listed}); {_gib(free)} are free on {device}.", hint=hint)


def free_bytes(device: torch.device) -> int | None:
    """The memory that can be had; None where the system does not say."""
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        known = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        try:
            known = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return None
    try:  # a container's limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        known = min(known, limit - int(Path("/sys/fs/cgroup/memory.current").read_text()) + _reclaimable())
    except (OSError, ValueError):
        pass
    return known


def _reclaimable() -> int:
    """Bytes of files that the container's memory has and can drop."""
    lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"
