"""Checks that a model's memory is free before anything is allocated."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from sglang_lite.protocol import ModelError
from sglang_lite.runtime.models.spec import ModelSpec


def weight_bytes(spec: ModelSpec, item: float) -> int:
    """Returns a lower bound on the bytes of a model's matrices.

    Args:
        spec: specification of the model.
        item: bytes per element.
    """
    tables = 1 if spec.tied_embeddings else 2
    layers = sum(layer.weight_elements(spec.hidden_size) for layer in spec.layers)
    inputs = spec.layer_input_size * (spec.layer_input_tokens + spec.hidden_size)
    return int((tables * spec.vocab_size * spec.hidden_size + layers + inputs) * item)


def rotary_bytes(spec: ModelSpec, positions: int) -> int:
    """Returns a lower bound on the bytes of the rotary tables for `positions` positions."""
    size = spec.first_attention.key_size
    return sum(positions * (rope.rotary_dim or size) * 4 for rope in spec.ropes)


def check_free_memory(
    parts: Mapping[str, int], device: torch.device, source: str, hint: str
) -> None:
    """Checks that enough memory is free for all parts of a model.

    Args:
        parts: bytes to be allocated, by purpose.
        device: device to allocate on.
        source: name of the model, for the message.
        hint: advice for the message: settings to change.

    Raises:
        ModelError: less memory is free than needed; the message has the numbers.
    """
    needed = sum(parts.values())
    free = free_bytes(device)
    if free is not None and needed > free:
        listed = ", ".join(f"{name} {_format_gib(count)}" for name, count in parts.items())
        raise ModelError(
            f"{source}: needs {_format_gib(needed)} ({listed}); {_format_gib(free)} are free on {device}.",
            hint=hint,
        )


def free_bytes(device: torch.device) -> int | None:
    """Returns the bytes of memory that can be allocated, or None if the system does not report
    them.
    """
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(
            int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration, ValueError, IndexError):
        try:
            available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (ValueError, OSError):
            return None
    try:  # limit of the container
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        available = min(
            available,
            limit
            - int(Path("/sys/fs/cgroup/memory.current").read_text())
            + _reclaimable_cache_bytes(),
        )
    except (OSError, ValueError):
        pass
    return available


def _reclaimable_cache_bytes() -> int:
    """Returns the bytes of page cache that count towards the container's memory but can be dropped."""
    lines = Path("/sys/fs/cgroup/memory.stat").read_text().splitlines()
    return sum(
        int(line.split()[1])
        for line in lines
        if line.startswith(("inactive_file ", "active_file "))
    )


def _format_gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"
