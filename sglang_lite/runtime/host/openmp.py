"""Limits the busy-waiting of torch's OpenMP threads. This works only before torch is loaded.

Torch's wheels bring GNU OpenMP, whose threads spin some 300,000 iterations (milliseconds) for new
work before they sleep. Next to another busy process, the spinning threads take CPU time from the
working ones, and a token takes many times as long (benchmarks/openmp.py). `SPINS` iterations just
outlast the gaps between the matrix products of a step.

The library reads the count from the environment when it is loaded. So this module loads it, before
torch, and then restores the environment: processes that the user starts keep their own defaults.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
import os
import sys
from pathlib import Path

logger = logging.getLogger("sglang_lite")

SPINS = 2_000
USERS_OWN = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def load_with_bounded_spinning() -> bool:
    """Loads torch's GNU OpenMP with a spin count of `SPINS`, unless the user has configured how its
    threads wait. Returns False if torch is already loaded with its default.
    """
    if any(name in os.environ for name in USERS_OWN):
        return True
    if "torch" in sys.modules:
        return False
    try:
        torch = importlib.util.find_spec("torch")
    except ImportError:  # an import hook of the caller rejects it
        torch = None
    if torch is not None and torch.origin is not None:
        folder = Path(torch.origin).parent
        for library in (*folder.glob("lib/libgomp*"), *folder.parent.glob("torch.libs/libgomp*")):
            os.environ["GOMP_SPINCOUNT"] = str(SPINS)
            try:
                ctypes.CDLL(str(library))
            finally:
                del os.environ["GOMP_SPINCOUNT"]
    return True


@functools.cache
def log_unbounded_spinning() -> None:
    """Logs once that torch was imported before its spinning could be bounded."""
    if not IS_BOUNDED:
        logger.info(
            "torch was imported before the engine's modules, so its threads wait as torch has it: beside another busy "
            "process decoding may be many times slower. Import sglang_lite.runtime first, or set GOMP_SPINCOUNT=%d.",
            SPINS,
        )


IS_BOUNDED = load_with_bounded_spinning()


def set_share_of_threads(threads: int | None, processes: int, replicas: int = 1) -> None:
    """Sets the number of torch's threads in one of several processes that compute together.

    Args:
        threads: threads of all of them; None for torch's own number, which is unchanged for one
            process.
        processes: number of processes.
        replicas: number of engines that share torch's own number.
    """
    import torch

    if threads is not None or processes * replicas > 1:
        torch.set_num_threads(max((threads or torch.get_num_threads() // replicas) // processes, 1))
