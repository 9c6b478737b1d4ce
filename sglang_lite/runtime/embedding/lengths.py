"""Helpers for texts that are concatenated to one sequence of tokens, described by their lengths."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from numpy.typing import NDArray


def positions(lengths: list[int]) -> NDArray[np.int64]:
    """Position of each token in its text, int64 [T]."""
    return np.concatenate([np.arange(length) for length in lengths])


def equal_lengths(lengths: list[int]) -> list[tuple[int, int]]:
    """Runs of equal lengths, as (number of texts, length) pairs."""
    return [(len(list(run)), length) for length, run in groupby(lengths)]
