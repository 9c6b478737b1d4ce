"""Limits of this machine, measured and not looked up. Every benchmark prints these beside its
figures.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from statistics import median

import torch

from sglang_lite.runtime.host.openmp import USERS_OWN


def describe(threads: int | None = None) -> str:
    """One line: processor, threads (torch's number, unless another is used) and how they wait,
    where the environment says so and not the engine, versions.
    """
    try:
        with open("/proc/cpuinfo") as file:
            name = next(
                line.split(":")[1].strip() for line in file if line.startswith("model name")
            )
    except (OSError, StopIteration):
        name = platform.processor()
    versions = []
    for package in ("torch", "transformers", "llama-cpp-python"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    threads = threads or torch.get_num_threads()
    waiting = "".join(f" ({name}={os.environ[name]})" for name in USERS_OWN if name in os.environ)
    return f"{name}, {threads} threads{waiting}, Python {platform.python_version()}, {', '.join(versions)}"


def seconds(work: Callable[[], object], repeats: int = 5) -> float:
    """The median time of `work`, after one call that does not count."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times)


def read_bandwidth() -> float:
    """Bytes per second at which memory is read: the limit of decoding, which reads every weight
    once a token.
    """
    data = torch.ones(256 * 2**20 // 4)
    return data.numel() * 4 / seconds(data.sum)


def copy_bandwidth() -> float:
    """Bytes per second, read plus written, of a large copy."""
    source = torch.ones(256 * 2**20 // 4)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / seconds(lambda: target.copy_(source))


def matmul_rate() -> float:
    """FLOP per second of a large product, of bfloat16 where there are units for it: the limit of
    prefill.
    """
    dtype = torch.bfloat16 if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32  # noqa: SLF001 # torch has no other name for it
    a, b = torch.randn(1024, 2048).to(dtype), torch.randn(2048, 2048).to(dtype)
    return 2 * 1024 * 2048 * 2048 / seconds(lambda: a @ b)
