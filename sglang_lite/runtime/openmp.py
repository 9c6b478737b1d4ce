"""Spinning of torch's threads: how long they look for their next product before they sleep.

Torch's wheels bring GNU OpenMP, whose threads look some 300,000 times (milliseconds). Beside another busy process those
that look take the time of those that work, and a token takes many times as long (benchmarks/openmp.py). `SPINS` times
outlast the gaps between the products of a step, and no more.

The library reads that from the environment when it is loaded. So it is loaded here, before torch, and the environment
is left as it was: processes that the user starts have their own defaults.
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


def bound_spinning() -> bool:
    """Loads torch's GNU OpenMP, where it has one, unless the user has set how its threads wait. False: torch has loaded
    it already, with its default."""
    if any(name in os.environ for name in USERS_OWN):
        return True
    if "torch" in sys.modules:
        return False
    try:
        torch = importlib.util.find_spec("torch")
    except ImportError:  # a finder of the caller's refuses it
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
def say_if_unbound() -> None:
    """Says once that torch came first."""
    if not BOUND:
        logger.info(
            "torch was imported before the engine's modules, so its threads wait as torch has it: beside another busy "
            "process decoding may be many times slower. Import sglang_lite.runtime first, or set GOMP_SPINCOUNT=%d.",
            SPINS,
        )


BOUND = bound_spinning()
