"""Lengths of texts that lie one after another."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from numpy.typing import NDArray


def positions(lengths: list[int]) -> NDArray[np.int64]:
    """Position of each token in its text [T]."""
    return np.concatenate([np.arange(length) for length in lengths])


def equal_lengths(lengths: list[int]) -> list[tuple[int, int]]:
    """Runs of equal lengths: how many, and which."""
    return [(len(list(run)), length) for length, run in groupby(lengths)]
