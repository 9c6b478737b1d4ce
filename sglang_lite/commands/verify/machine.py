"""Versions and machine of a verification, without host or user names."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import torch

from sglang_lite.protocol.anything import Json
from sglang_lite.version import __version__

_PACKAGES = ("torch", "transformers", "tokenizers", "llguidance", "gguf", "triton")


def package_versions() -> dict[str, str]:
    """Returns the versions of Python, this package and the packages that compute."""
    found = {"sglang_lite": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def describe_machine(device: str) -> dict[str, Json]:
    """Describes this machine: processor, memory and, if the model runs on one, GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found: dict[str, Json] = {
        "platform": platform.platform(),
        "processor": _processor_name(),
        "cores": cores,
        "memory_bytes": _memory_bytes(),
        "device": device,
    }
    if device.startswith("cuda"):
        found["gpu"] = torch.cuda.get_device_name(torch.device(device))
    return found


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
