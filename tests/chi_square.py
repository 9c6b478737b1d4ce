"""Compares counts with probabilities."""

from __future__ import annotations

from collections.abc import Mapping


def chi_square_fits(counts: Mapping[str | None, int], probs: Mapping[str, float]) -> bool:
    """Whether counts fit probabilities, p > 0.001; cells with fewer than five are put together."""
    total = sum(counts.values())
    cells: list[tuple[float, float]] = []
    rest = [0.0, 0.0]
    for text, share in probs.items():
        if total * share < 5:
            rest[0] += counts.get(text, 0)
            rest[1] += total * share
        else:
            cells.append((counts.get(text, 0), total * share))
    cells += [(rest[0], rest[1])] if rest[1] >= 1 else []
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = max(len(cells) - 1, 1)
    # Wilson and Hilferty's approximation of the quantile for p = 0.001
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    return statistic < limit
