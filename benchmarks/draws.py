"""Draws of tokens on a CPU: the race, beside a search in the cumulated probabilities.

    python benchmarks/draws.py [--vocabulary 151936] [--rows 1,32]

Milliseconds to draw one token for each row of logits at temperature 1, the median of some calls, by
turns. The search is what the runtime did before: softmax, sums in float64, one uniform number a row.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from sglang_lite.runtime.kernels.race import compile_race, draw_tokens

REPEAT = 31


def search(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draws by inverse-transform sampling."""
    mass = torch.softmax(logits / 1.0, -1).double().cumsum(-1)
    return torch.searchsorted(mass, (uniforms * mass[:, -1]).unsqueeze(1), right=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", default="1,32")
    options = parser.parse_args(arguments)
    print(f"{torch.get_num_threads()} threads, compiled: {compile_race() is not None}")
    for count in map(int, options.rows.split(",")):
        for spread in (1.0, 3.0):  # standard deviation of the logits
            logits = torch.randn(count, options.vocabulary) * spread
            uniforms = torch.rand(count, dtype=torch.float64)
            rows, ones = np.arange(count), np.ones(count, dtype=np.float32)
            took: tuple[list[float], list[float]] = ([], [])
            for position in range(REPEAT):
                seeds = np.arange(count, dtype=np.uint64)
                positions = np.full(count, position, dtype=np.int32)
                begun = time.perf_counter()
                draw_tokens(logits, rows, ones, seeds, positions)
                between = time.perf_counter()
                search(logits, uniforms)
                took[0].append(between - begun)
                took[1].append(time.perf_counter() - between)
            race, sums = (1000 * median(each) for each in took)
            print(
                f"{count:3} rows, spread {spread:.0f}: race {race:7.3f} ms, search {sums:7.3f} ms, "
                f"ratio {race / sums:.2f}"
            )


if __name__ == "__main__":
    main()
