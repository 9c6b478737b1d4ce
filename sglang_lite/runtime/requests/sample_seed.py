"""Derives the seeds of a request's samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


def derive_sample_seed(seed: int, index: int) -> int:
    """Returns the seed of sample number `index` of a request; the first sample's is `seed` itself."""
    if not index:
        return seed
    with np.errstate(over="ignore"):
        return int(
            _finalise_splitmix(
                np.array(seed % 2**64, dtype=np.uint64) + np.uint64(index) * _INCREMENT
            )
        )


def _finalise_splitmix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
