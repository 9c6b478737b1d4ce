"""Random numbers as pure functions of a seed and a position, which keeps a request's draws
independent of others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sglang_lite.runtime.kv_cache.pages import Ints


def draw_uniforms(
    seeds: NDArray[np.uint64], positions: Ints, forbidden: Ints | int = 0
) -> NDArray[np.float64]:
    """Returns uniform random numbers in [0, 1), float64 [R]. Each depends only on its row's seed,
    position and `forbidden`.

    Args:
        seeds: seed of each row, uint64 [R].
        positions: position of each row's draw, int32 [R].
        forbidden: number of tokens that the draw's mask forbids, int32 [R]. A draw after a rejected
            one forbids more, which gives it another number: the old one would reveal which token
            was rejected.
    """
    with np.errstate(over="ignore"):
        # Seeds are mixed first: two seeds that differ by a multiple of the increment must not give
        # shifted copies of one sequence.
        places = positions.astype(np.uint64) + (
            np.asarray(forbidden, dtype=np.uint64) << np.uint64(32)
        )
        mixed = _finalise_splitmix(_finalise_splitmix(seeds) + (places + np.uint64(1)) * _INCREMENT)
    numbers: NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


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


_INCREMENT = np.uint64(0x9E3779B97F4A7C15)


def _finalise_splitmix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies SplitMix64's finaliser (Steele, Lea and Flood, OOPSLA 2014)."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
